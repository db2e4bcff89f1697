"""Load a run folder for the report, tolerating the files of unfinished and crashed runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import yaml

from vlm_grpo.errors import UserError
from vlm_grpo.eval.statistics import bootstrap_interval
from vlm_grpo.task.registry import load_task_class, task_names
from vlm_grpo.utils.jsonl import parse_lines

Row = Mapping[str, Any]


@dataclass(frozen=True)
class HeldOutEvaluation:
    """One evaluation on the held-out examples.

    Attributes:
        step: number of steps that the policy had been trained for.
        values: for each reward and metric, its value by example id, where it is defined.
        corpus: metrics that are not a mean over the examples, such as AP or RMSE.
        primary_metric: name of the metric by which models are compared; None if unknown.
        lower_is_better: whether the primary metric is an error.
    """

    step: int
    values: Mapping[str, Mapping[str, float]]
    corpus: Mapping[str, float] = field(default_factory=dict)
    primary_metric: str | None = None
    lower_is_better: bool = False

    @property
    def n(self) -> int:
        return max((len(values) for values in self.values.values()), default=0)

    @property
    def names(self) -> list[str]:
        return [*self.values, *self.corpus]

    def mean(self, name: str) -> float:
        """Return the metric over all examples; NaN if it is defined for none."""
        if name in self.corpus:
            return self.corpus[name]
        values = self.values.get(name, {})
        return float(np.mean(list(values.values()))) if values else math.nan

    def interval(self, name: str, seed: int) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of the mean; NaN for a corpus metric."""
        return bootstrap_interval(list(self.values.get(name, {}).values()), seed)


@dataclass(frozen=True)
class Change:
    """The change of a metric between two evaluations on the same held-out examples.

    Attributes:
        before, after: the values.
        before_interval, after_interval: their 95 % intervals; NaN for a corpus metric.
        difference_interval: 95 % interval of the mean paired difference; NaN without pairs.
        n: number of examples.
        steps: steps of the two evaluations.
    """

    before: float
    before_interval: tuple[float, float]
    after: float
    after_interval: tuple[float, float]
    difference_interval: tuple[float, float]
    n: int
    steps: tuple[int, int]
    lower_is_better: bool = False

    @property
    def verdict(self) -> str:
        """Whether the change is "better" or "worse"; "" if its interval contains 0 or is NaN."""
        low, high = self.difference_interval
        if not (low > 0.0 or high < 0.0):
            return ""
        return "better" if (low > 0.0) != self.lower_is_better else "worse"


@dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    Attributes:
        config: the resolved settings; empty if there are none.
        metrics: one row of numbers per step, in order.
        samples: rows of sampled groups and of held-out answers.
        unreadable: number of lines that are not a JSON object.
        distributions: rows with a sample of the values of each distribution, by step.
    """

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    metrics: tuple[Row, ...]
    alarms: tuple[Row, ...]
    evaluations: tuple[HeldOutEvaluation, ...]
    samples: tuple[Row, ...]
    unreadable: int
    distributions: tuple[Row, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def task(self) -> str:
        return str(self.config.get("task", "unknown task"))

    @property
    def model(self) -> str:
        return str(self.config.get("model", "unknown model"))

    @property
    def seed(self) -> int:
        seed = self.config.get("seed", 0)
        return seed if isinstance(seed, int) and seed >= 0 else 0

    @property
    def max_steps(self) -> int | None:
        optim = self.config.get("optim")
        steps = optim.get("max_steps") if isinstance(optim, Mapping) else None
        return steps if isinstance(steps, int) else None

    @property
    def steps_done(self) -> int:
        return int(self.metrics[-1]["step"]) + 1 if self.metrics else 0

    @property
    def primary_metric(self) -> str | None:
        """The name of the metric by which models are compared; None if unknown."""
        if self.evaluations and self.evaluations[-1].primary_metric is not None:
            return self.evaluations[-1].primary_metric
        for row in self.samples:  # files have the primary metric under its former name
            if isinstance(row.get("headline"), str):
                return row["headline"]
        # A task's file is not executed for this: the folder may come from someone else.
        return load_task_class(self.task).primary_metric if self.task in task_names() else None

    def change(self, until: int | None = None) -> Change | None:
        """Return the change of the primary metric from the first evaluation to the last.

        Args:
            until: step of the evaluation to use instead of the last one.

        Returns:
            None if there are fewer than two evaluations, or if one of them lacks the metric.
        """
        last = next((e for e in reversed(self.evaluations) if until in (None, e.step)), None)
        if last is None or last is self.evaluations[0] or (name := self.primary_metric) is None:
            return None
        first = self.evaluations[0]
        before, after = first.mean(name), last.mean(name)
        if math.isnan(before) or math.isnan(after):
            return None
        first_values, last_values = first.values.get(name, {}), last.values.get(name, {})
        differences = [last_values[i] - first_values[i] for i in first_values if i in last_values]
        return Change(
            before,
            first.interval(name, self.seed),
            after,
            last.interval(name, self.seed),
            bootstrap_interval(differences, self.seed),
            len(last_values) or last.n,
            (first.step, last.step),
            last.lower_is_better,
        )


def read_run(folder: Path) -> Run:
    """Load a run's folder.

    Raises:
        UserError: the folder does not exist, or is not that of a run.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}")
    config_path = folder / "config.yaml"
    text = config_path.read_text("utf-8", errors="replace") if config_path.is_file() else ""
    reader = _Reader()
    metrics, distributions = (
        sorted(filter(_has_step, reader.read(folder / name)), key=lambda row: row["step"])
        for name in ("metrics.jsonl", "distributions.jsonl")
    )
    samples = [
        {**row, "source": path.name}
        for path in sorted((folder / "samples").glob("*.jsonl"))
        for row in reader.read(path)
        if _has_step(row)
    ]
    if not text and not metrics and not samples:
        raise UserError(
            f"{folder} holds no run: a run's folder has config.yaml and metrics.jsonl in it"
        )
    return Run(
        folder=folder,
        config=_parse_mapping(text),
        config_text=text,
        metrics=tuple(metrics),
        alarms=tuple(reader.read(folder / "alarms.jsonl")),
        evaluations=tuple(_read_evaluations(folder / "evaluation", reader)),
        samples=tuple(samples),
        unreadable=reader.unreadable,
        distributions=tuple(distributions),
    )


def read_outputs(run: Run, step: int) -> dict[str, str]:
    """Return the text of every held-out answer of an evaluation, by example id."""
    path = run.folder / "evaluation" / f"step-{step:06d}.jsonl"
    return {str(row.get("id")): str(row.get("output", "")) for row in _Reader().read(path)}


class _Reader:
    """A reader of JSON Lines files that skips unreadable lines and counts them."""

    def __init__(self) -> None:
        self.unreadable = 0

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        # Not read_rows, which refuses a file with an unreadable line: the rest can be shown.
        for _, row in parse_lines(path.read_bytes() if path.is_file() else b""):
            if row is None:
                self.unreadable += 1
            else:
                yield row


def _read_evaluations(folder: Path, reader: _Reader) -> Iterator[HeldOutEvaluation]:
    """Yield the evaluations during training; those of checkpoints have names like ``step-4``."""
    for path in sorted(folder.glob("step-*.jsonl")):
        if (match := re.fullmatch(r"step-(\d{6,})", path.stem)) is None:
            continue
        values: dict[str, dict[str, float]] = {}
        for row in reader.read(path):
            for key in ("rewards", "metrics"):
                columns = row.get(key)
                for name, value in columns.items() if isinstance(columns, dict) else ():
                    if is_number(value):
                        values.setdefault(name, {})[str(row.get("id"))] = float(value)
        yield _add_summary(HeldOutEvaluation(int(match[1]), values), path.with_suffix(".json"))


def _add_summary(evaluation: HeldOutEvaluation, path: Path) -> HeldOutEvaluation:
    """Return the evaluation with the corpus metrics of its summary file, if that is readable."""
    try:
        summary = json.loads(path.read_text("utf-8", errors="replace"))
        primary_metric, metrics = summary["headline"], summary["metrics"]
        if not isinstance(primary_metric, str):
            return evaluation
        numbers = {name: float(value) for name, value in metrics.items() if is_number(value)}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return evaluation
    corpus = {
        name: value
        for name, value in numbers.items()
        if name not in ("answered", "unscorable")
        and not math.isclose(evaluation.mean(name), value, abs_tol=1e-9)
    }
    values = {name: column for name, column in evaluation.values.items() if name not in corpus}
    lower_is_better = summary.get("lower_is_better") is True
    return HeldOutEvaluation(evaluation.step, values, corpus, primary_metric, lower_is_better)


def _parse_mapping(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _has_step(row: Row) -> bool:
    step = row.get("step")
    return isinstance(step, int) and not isinstance(step, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether the value is a finite number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
