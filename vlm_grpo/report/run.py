"""Load a run folder for the report, tolerating the files of unfinished and crashed runs."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from vlm_grpo.errors import UserError
from vlm_grpo.eval.scored import Scored, read_scored
from vlm_grpo.eval.statistics import bootstrap_interval
from vlm_grpo.task.registry import load_task_class, task_names
from vlm_grpo.utils.jsonl import parse_lines

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """The change of a metric between two evaluations on the same held-out examples."""

    before: float
    before_interval: tuple[float, float]  # 95 % interval; NaN for a corpus metric
    after: float
    after_interval: tuple[float, float]
    # mean difference of the examples that both scored; without any, of the values
    difference: float
    # 95 % interval of the mean paired difference; NaN without pairs
    difference_interval: tuple[float, float]
    n: int  # number of examples of the later evaluation
    steps: tuple[int, int]  # steps of the two evaluations
    lower_is_better: bool = False

    @property
    def verdict(self) -> str:
        """Whether the change is "better" or "worse"; "" if its interval contains 0 or is NaN."""
        low, high = self.difference_interval
        if not (low > 0.0 or high < 0.0):
            return ""
        return "better" if (low > 0.0) != self.lower_is_better else "worse"


def measure_change(first: Scored, last: Scored, name: str) -> Change | None:
    """Return the change of a metric; None if one of the evaluations lacks it."""
    before, after = (table.metrics.get(name, math.nan) for table in (first, last))
    if math.isnan(before) or math.isnan(after):
        return None
    pairs = last.pair(first, name)
    differences = [[b - a for a, b in part.values()] for part in pairs]
    return Change(
        before,
        first.get_interval(name),
        after,
        last.get_interval(name),
        fmean(map(fmean, differences)) if pairs and all(pairs) else after - before,
        bootstrap_interval(*differences, seed=last.seed),
        last.get_n(name),
        (first.step, last.step),
        last.is_error(name),
    )


@dataclass(frozen=True)
class Run:
    """The contents of a run folder."""

    folder: Path
    config: Mapping[str, Any]  # the resolved settings; empty if there are none
    config_text: str
    metrics: Sequence[Row]  # one row of numbers per step, in order
    alarms: Sequence[Row]
    evaluations: Sequence[Scored]
    samples: Sequence[Row]  # rows of sampled groups and of held-out answers
    distributions: Sequence[Row]  # by step, a sample of the values of each distribution
    unreadable: int  # number of lines that are not a JSON object

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
        """The name of the metric by which models are compared; None if unknown."""
        if self.evaluations and self.evaluations[-1].primary_metric:
            return self.evaluations[-1].primary_metric
        for row in self.samples:  # files have the primary metric under its former name
            if isinstance(row.get("headline"), str):
                return row["headline"]
        # A task's file is not executed for this: the folder may come from someone else.
        return load_task_class(self.task).primary_metric if self.task in task_names() else None

    def change(self, until: int | None = None) -> Change | None:
        """Return the change of the primary metric from the first evaluation to the last, or to that
        after ``until`` steps; None if there are fewer than two, or if one lacks the metric."""
        last = next((e for e in reversed(self.evaluations) if until in (None, e.step)), None)
        if last is None or last is self.evaluations[0] or (name := self.primary_metric) is None:
            return None
        return measure_change(self.evaluations[0], last, name)


def read_run(folder: Path) -> Run:
    """Load a run's folder; ``UserError``: it does not exist, or is not that of a run."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}")
    config_path = folder / "config.yaml"
    text = config_path.read_text("utf-8", errors="replace") if config_path.is_file() else ""
    config, unreadable = None, 0
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        config = yaml.safe_load(text)
    config = config if isinstance(config, dict) else {}
    seed = config.get("seed")
    seed = seed if isinstance(seed, int) and seed >= 0 else 0

    def read(path: Path) -> Iterator[dict[str, Any]]:
        nonlocal unreadable
        # Not read_rows, which refuses a file with an unreadable line: the rest can be shown.
        for _, row in parse_lines(path.read_bytes() if path.is_file() else b""):
            if row is None:
                unreadable += 1
            else:
                yield row

    metrics, distributions = (
        sorted(filter(_has_step, read(folder / name)), key=lambda row: row["step"])
        for name in ("metrics.jsonl", "distributions.jsonl")
    )
    samples = [
        {**row, "source": path.name}
        for path in sorted((folder / "samples").glob("*.jsonl"))
        for row in filter(_has_step, read(path))
    ]
    if not text and not metrics and not samples:
        raise UserError(
            f"{folder} holds no run: a run's folder has config.yaml and metrics.jsonl in it"
        )
    alarms = [*read(folder / "alarms.jsonl")]
    evaluations = [
        read_scored(path, seed, read(path), int(match[1]))
        for path in sorted((folder / "evaluation").glob("step-*.jsonl"))
        # Those of checkpoints, which are not of the training, have names like step-4.
        if (match := re.fullmatch(r"step-(\d{6,})", path.stem))
    ]
    return Run(
        folder, config, text, metrics, alarms, evaluations, samples, distributions, unreadable
    )


def _has_step(row: Row) -> bool:
    step = row.get("step")
    return isinstance(step, int) and not isinstance(step, bool)
