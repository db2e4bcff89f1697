"""What a run's folder says of the run, read leniently: a run may be going on or have crashed."""

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
from vlm_grpo.registry import load_task_class, task_names
from vlm_grpo.utils.bootstrap import bootstrap_interval
from vlm_grpo.utils.jsonl import parse_lines

Row = Mapping[str, Any]


@dataclass(frozen=True)
class HeldOut:
    """One evaluation on the held-out examples.

    Attributes:
        step: updates that the policy had seen.
        values: for each reward and metric by name, its value by example id where it is defined.
        whole: metrics that are no mean over the examples, as AP or RMSE.
        primary metric: name of the metric by which models are compared; None where nothing tells.
        lower_is_better: the primary metric is an error.
    """

    step: int
    values: Mapping[str, Mapping[str, float]]
    whole: Mapping[str, float] = field(default_factory=dict)
    primary_metric: str | None = None
    lower_is_better: bool = False

    @property
    def n(self) -> int:
        return max((len(values) for values in self.values.values()), default=0)

    @property
    def names(self) -> list[str]:
        """Of all rewards and metrics."""
        return [*self.values, *self.whole]

    def mean(self, name: str) -> float:
        """The metric over all examples; NaN where it is defined for none."""
        if name in self.whole:
            return self.whole[name]
        values = self.values.get(name, {})
        return float(np.mean(list(values.values()))) if values else math.nan

    def interval(self, name: str, seed: int) -> tuple[float, float]:
        """Its 95 % bootstrap interval; NaN for a metric of the whole set."""
        return bootstrap_interval(list(self.values.get(name, {}).values()), seed)


@dataclass(frozen=True)
class Change:
    """A metric on the same held-out examples before and after; values and 95 % intervals.

    A metric of the whole set has no interval: its intervals are NaN. ``lower_is_better``: it is an
    error.
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
    def worse(self) -> bool:
        """Whether the value after is worse than the one before, however little."""
        return self.after > self.before if self.lower_is_better else self.after < self.before


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Attributes:
        folder: the run's folder.
        config: the resolved settings as written; empty where there are none.
        config_text: the same, as it stands in the file.
        metrics: one row of numbers for each step, in order.
        alarms: rows of step, name, message and remedy.
        evaluations: by step, in order.
        samples: rows of what the policy wrote, training groups and held-out answers.
        unreadable: lines that are no JSON object.
    """

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    metrics: tuple[Row, ...]
    alarms: tuple[Row, ...]
    evaluations: tuple[HeldOut, ...]
    samples: tuple[Row, ...]
    unreadable: int

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
    def max_steps(self) -> int | None:
        optim = self.config.get("optim")
        steps = optim.get("max_steps") if isinstance(optim, Mapping) else None
        return steps if isinstance(steps, int) else None

    @property
    def steps_done(self) -> int:
        return int(self.metrics[-1]["step"]) + 1 if self.metrics else 0

    @property
    def primary_metric(self) -> str | None:
        """Name of the metric by which models are compared; None where nothing tells."""
        if self.evaluations and self.evaluations[-1].primary_metric is not None:
            return self.evaluations[-1].primary_metric
        for row in self.samples:
            if isinstance(row.get("headline"), str):
                return row["headline"]
        # A task's file is not run for this: the folder may come from somebody else.
        return load_task_class(self.task).primary_metric if self.task in task_names() else None

    def change(self, until: int | None = None) -> Change | None:
        """The primary metric metric at the first and the last evaluation; None where there are no
        two.

        Args:
            until: the step of the evaluation to take in the last one's place; None: the last.
        """
        last = next((e for e in reversed(self.evaluations) if until in (None, e.step)), None)
        if last is None or last is self.evaluations[0] or (name := self.primary_metric) is None:
            return None
        first = self.evaluations[0]
        before, after = first.mean(name), last.mean(name)
        if math.isnan(before) or math.isnan(after):
            return None
        each, later = first.values.get(name, {}), last.values.get(name, {})
        differences = [later[i] - each[i] for i in each if i in later]
        return Change(
            before,
            first.interval(name, self.seed),
            after,
            last.interval(name, self.seed),
            bootstrap_interval(differences, self.seed),
            len(later) or last.n,
            (first.step, last.step),
            last.lower_is_better,
        )

    @property
    def seed(self) -> int:
        seed = self.config.get("seed", 0)
        return seed if isinstance(seed, int) and seed >= 0 else 0


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        UserError: there is no such folder, or nothing of a run in it.
    """
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}")
    config_path = folder / "config.yaml"
    text = config_path.read_text("utf-8", errors="replace") if config_path.is_file() else ""
    reader = _Reader()
    metrics = [row for row in reader.rows(folder / "metrics.jsonl") if _is_step(row)]
    samples = [
        {**row, "source": path.name}
        for path in sorted((folder / "samples").glob("*.jsonl"))
        for row in reader.rows(path)
        if _is_step(row)
    ]
    if not text and not metrics and not samples:
        raise UserError(
            f"{folder} holds no run: a run's folder has config.yaml and metrics.jsonl in it"
        )
    return Run(
        folder=folder,
        config=_mapping(text),
        config_text=text,
        metrics=tuple(sorted(metrics, key=lambda row: row["step"])),
        alarms=tuple(reader.rows(folder / "alarms.jsonl")),
        evaluations=tuple(_evaluations(folder / "evaluation", reader)),
        samples=tuple(samples),
        unreadable=reader.unreadable,
    )


class _Reader:
    """Reads JSON Lines and counts the lines that hold no object."""

    def __init__(self) -> None:
        self.unreadable = 0

    def rows(self, path: Path) -> Iterator[dict[str, Any]]:
        for _, row in parse_lines(path):
            if row is None:
                self.unreadable += 1
            else:
                yield row


def _evaluations(folder: Path, reader: _Reader) -> Iterator[HeldOut]:
    """Evaluations during training, by step; not those of checkpoints, such as ``step-4.jsonl``."""
    for path in sorted(folder.glob("step-*.jsonl")):
        if (match := re.fullmatch(r"step-(\d{6,})", path.stem)) is None:
            continue
        values: dict[str, dict[str, float]] = {}
        for row in reader.rows(path):
            for part in ("rewards", "metrics"):
                columns = row.get(part)
                for name, value in columns.items() if isinstance(columns, dict) else ():
                    if is_number(value):
                        values.setdefault(name, {})[str(row.get("id"))] = float(value)
        yield _summarised(HeldOut(int(match[1]), values), path.with_suffix(".json"))


def _summarised(found: HeldOut, path: Path) -> HeldOut:
    """With what the evaluation itself says of the whole, where it can be read."""
    try:
        summary = json.loads(path.read_text("utf-8", errors="replace"))
        primary_metric, metrics = summary["headline"], summary["metrics"]
        if not isinstance(primary_metric, str):
            return found
        numbers = {name: float(value) for name, value in metrics.items() if is_number(value)}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return found
    whole = {
        name: value
        for name, value in numbers.items()
        if name not in ("answered", "unscorable")
        and not math.isclose(found.mean(name), value, abs_tol=1e-9)
    }
    values = {name: column for name, column in found.values.items() if name not in whole}
    lower = summary.get("lower_is_better") is True
    return HeldOut(found.step, values, whole, primary_metric, lower)


def _mapping(text: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _is_step(row: Row) -> bool:
    step = row.get("step")
    return isinstance(step, int) and not isinstance(step, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
