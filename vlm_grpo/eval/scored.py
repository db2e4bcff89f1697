"""Scored outputs: the table of every evaluation, its summary, its comparison and its files."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeGuard

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from vlm_grpo.eval.pass_at_k import list_sample_metrics, merge_scores
from vlm_grpo.eval.statistics import bootstrap_interval, format_value
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.task.episodes import count_calls
from vlm_grpo.task.scorer import group_by_source
from vlm_grpo.types import Completion, EpisodeTurn, Example, Score
from vlm_grpo.utils.atomic_io import write_atomic
from vlm_grpo.utils.jsonl import format_rows, read_valid_rows

logger = logging.getLogger(__name__)

WITHOUT_TOOLS = "_without_tools"  # ends the name of a primary metric of the model without tools
_SHARES = ("gain", "harm", "prompt", "called", "errors", "cut")
_DEFECTS = ("tools/harm", "tools/errors", "tools/cut")


class Output(TypedDict):
    """An output of a model and its values by name."""

    output: str
    # of an episode; from a file, what ``to_json`` returns
    turns: NotRequired[Sequence[EpisodeTurn]]
    answer: Any  # None: it has none
    reward: float | None  # weighted sum of the rewards; None: one of them failed
    rewards: Mapping[str, float | None]
    metrics: Mapping[str, float | None]


class Row(Output):
    """An example with its output.

    With several outputs, these are the first output and the means of the values, and ``samples``
    has every output with its own.
    """

    id: str
    source: NotRequired[str]  # in a mixture
    samples: NotRequired[list[Output]]


@dataclass(frozen=True)
class Scored:
    """Scored outputs of n examples, with one or several outputs each.

    ``metrics`` has the mean of every reward and metric, over the examples where it is defined, and
    metrics of the full set, such as average precision; ``answered`` is the share of outputs with an
    answer, ``unscorable`` the number of outputs on which a weighted reward failed.
    """

    rows: tuple[Row, ...]  # one per example
    primary_metric: str  # empty if a file does not have it
    metrics: Mapping[str, float]
    lower_is_better: bool = False  # the primary metric is an error
    # 95 % bootstrap intervals that do not follow from the rows alone
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # the metrics of a mixture's sources whose mean the primary metric is, in which an error counts
    # as 1 less it, and whether each is an error
    parts: Mapping[str, bool] = field(default_factory=dict)
    seed: int = 0  # of the bootstrap
    path: Path | None = None  # file of the table; None: it was not written
    step: int = 0  # number of steps that the policy had been trained for
    is_complete: bool = True  # False: the file's summary is missing, damaged or of other rows

    @property
    def n(self) -> int:
        return len(self.rows)

    @property
    def value(self) -> float:
        """Value of the primary metric."""
        return self.metrics[self.primary_metric]

    @property
    def interval(self) -> tuple[float, float]:
        return self.get_interval(self.primary_metric)

    @cached_property
    def values(self) -> Mapping[str, Mapping[str, float]]:
        """For each metric that is a mean over examples, its values by id, where it is defined."""
        # A metric of the full set may have values of examples too, but is not their mean.
        return {
            name: column
            for name, column in collect_columns(self.rows).items()
            if math.isclose(
                self.metrics.get(name, column_mean(column)), column_mean(column), abs_tol=1e-9
            )
        }

    def get_column(self, name: str) -> list[float | None]:
        return [row["rewards"].get(name, row["metrics"].get(name)) for row in self.rows]

    @property
    def corpus(self) -> dict[str, float]:
        """Metrics of the full set, which are not means over examples."""
        known = (*self.values, "answered", "unscorable")
        return {name: value for name, value in self.metrics.items() if name not in known}

    @property
    def names(self) -> list[str]:
        return [*self.values, *self.corpus]

    def get_interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of a metric; NaN for a metric of the full set."""
        if name in self.intervals:
            return self.intervals[name]
        return bootstrap_interval([*self.values.get(name, {}).values()], seed=self.seed)

    def get_n(self, name: str) -> int:
        """Return the number of examples that a metric is of: a mean is of those that have it."""
        if name in self.values:
            return len(self.values[name])
        if self.parts and name == self.primary_metric:
            return sum(map(self.get_n, self.parts))
        sources = Counter(str(row["source"]) for row in self.rows if "source" in row)
        own = [source for source in sources if name.startswith(f"{source}/")]
        return sources[max(own, key=len)] if own else self.n

    def is_error(self, name: str) -> bool:
        """Return whether a metric is known to be better if it is lower."""
        name = name.removesuffix(WITHOUT_TOOLS)
        own = name in _DEFECTS or (self.lower_is_better and name == self.primary_metric)
        return self.parts.get(name, own)

    def pair(
        self, before: Scored, name: str, changed: Collection[str] = ()
    ) -> list[dict[str, tuple[float, float]]]:
        """Return a metric's value before and in this table, by id, of the examples that have both.

        A mixture's primary metric has a part for each source, whose means count equally; there is
        none if the sources differ. Ids in ``changed`` are left out.
        """
        parts = {name: False}
        if self.parts and name == self.primary_metric:
            parts = self.parts if self.parts == before.parts else {}
        found = []
        for part, is_error in parts.items():
            first, last = before.values.get(part, {}), self.values.get(part, {})
            ids = [i for i in last if i in first and i not in changed]
            found.append(
                {i: (1 - first[i], 1 - last[i]) if is_error else (first[i], last[i]) for i in ids}
            )
        return found

    def is_better_than(self, other: float | None) -> bool:
        """Return whether the primary metric is better than ``other``; every number beats None."""
        if math.isnan(self.value):
            return False
        if other is None:
            return True
        return self.value < other if self.lower_is_better else self.value > other

    def __str__(self) -> str:
        return self.describe(self.primary_metric)

    def describe(self, name: str) -> str:
        """Return a metric's name, value, interval and number of examples."""
        bounds, is_error = self.get_interval(name), self.is_error(name)
        value, low, high = (format_value(v, is_error) for v in (self.metrics[name], *bounds))
        interval = "" if math.isnan(bounds[0]) else f" [{low}, {high}]"
        return f"{name} {value}{interval} (n = {self.get_n(name)})"

    @property
    def lines(self) -> list[str]:
        """Descriptions of the primary metric, of those of a mixture's sources, and of tools."""
        known = self.primary_metric, *self.parts
        plain = [name + WITHOUT_TOOLS for name in known if name + WITHOUT_TOOLS in self.metrics]
        lines = [*map(self.describe, (*known, *plain))]
        if (calls := self.metrics.get("tools/calls")) is not None:
            shares = ((n, self.metrics.get(f"tools/{n}")) for n in _SHARES)
            texts = [f"{name} {format_value(v)}" for name, v in shares if v is not None]
            lines.append(f"tools: {', '.join(texts)}, {calls:.2f} calls each")
        return lines

    def write(self, path: Path) -> None:
        """Write the rows as JSON Lines, and the summary as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, format_rows(self.rows))
        summary = _Summary(
            headline=self.primary_metric,
            lower_is_better=self.lower_is_better,
            n=self.n,
            metrics={name: v for name, v in self.metrics.items() if math.isfinite(v)},
            intervals={n: i for n, i in self.intervals.items() if math.isfinite(i[0])},
            parts=dict(self.parts),
        )
        write_atomic(path.with_suffix(".json"), summary.model_dump_json(indent=1).encode())


class _Summary(BaseModel):
    """What the rows do not have; ``headline`` is the primary metric's name."""

    headline: str
    lower_is_better: bool = False
    n: int | None = None
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    parts: dict[str, bool] = Field(default_factory=dict)


def read_scored(
    path: Path, seed: int = 0, rows: Iterable[Mapping[str, Any]] | None = None, step: int = 0
) -> Scored:
    """Read a table, as far as its files can be read: without a summary, the means are the rows'.

    ``rows`` are those of the file, if it is read already.
    """
    read = tuple(map(_read_row, read_valid_rows(path) if rows is None else rows))
    found = Scored(read, "", {}, seed=seed, step=step, is_complete=False)
    means = {name: column_mean(column) for name, column in found.values.items()}
    try:
        text = path.with_suffix(".json").read_text("utf-8", errors="replace")
        summary = _Summary.model_validate_json(text)
    except (OSError, ValidationError):
        return replace(found, metrics=means)
    return replace(
        found,
        primary_metric=summary.headline,
        # A primary metric that is undefined on every example is not in the file.
        metrics=means
        | dict.fromkeys((summary.headline, *summary.parts), math.nan)
        | summary.metrics,
        lower_is_better=summary.lower_is_better,
        intervals=summary.intervals,
        parts=summary.parts,
        is_complete=summary.n == len(read),
    )


def _read_row(row: Mapping[str, Any]) -> Row:
    rewards, metrics = (
        {name: value for name, value in values.items() if value is None or is_number(value)}
        if isinstance(values := row.get(key), dict)
        else {}
        for key in ("rewards", "metrics")
    )
    given = {"id": str(row.get("id")), "output": str(row.get("output", ""))}
    given |= {name: row.get(name) for name in ("answer", "reward")}
    found: Any = {**row, **given, "rewards": rewards, "metrics": metrics}
    return found


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether the value is a finite number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def collect_columns(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return the values of every reward and metric by id, of the rows where it is defined."""
    columns: dict[str, dict[str, float]] = {}
    for row in rows:
        for name, value in (*row["rewards"].items(), *row["metrics"].items()):
            if value is not None:
                columns.setdefault(name, {})[row["id"]] = value
    return columns


def column_mean(column: Mapping[str, float]) -> float:
    return float(np.mean([*column.values()]))


def summarize(
    task: Task,
    examples: Sequence[Example],
    outputs: Sequence[Completion],
    scores: Sequence[Score],
    seed: int,
) -> Scored:
    """Build the table of outputs: as many of each example, one example after the other."""
    count = len(outputs) // len(examples)
    pairs = zip(scores, outputs, strict=True)
    scores = [replace(s, metrics={**s.metrics, **count_calls(o.turns)}) for s, o in pairs]
    items = [example for example in examples for _ in range(count)]
    own_scores = [scores[start : start + count] for start in range(0, len(scores), count)]
    rows: list[Any] = []
    for number, (example, own) in enumerate(zip(examples, own_scores, strict=True)):
        own_outputs = outputs[number * count : (number + 1) * count]
        samples = [*map(_build_output, own_outputs, own)]
        row = {"id": example.id} | ({"source": example.source} if example.source else {})
        row |= _build_output(own_outputs[0], merge_scores(task, example, own))
        rows.append(row | ({"samples": samples} if count > 1 else {}))
    columns = collect_columns(rows)
    names = dict.fromkeys(name for row in rows for name in (*row["rewards"], *row["metrics"]))
    metrics = {name: column_mean(columns[name]) for name in names if name in columns}
    metrics["answered"] = _get_answered(scores)
    metrics["unscorable"] = sum(score.total is None for score in scores)
    # The values by source of the primary metric, which has no name here, and of those of samples.
    columns_by_name: dict[str, list[tuple[float, list[float]]]] = {}
    parts: dict[str, bool] = {}
    for source, own, indices in group_by_source(task, items):
        start = f"{source}/" if source else ""
        own_items = [scores[i] for i in indices]
        corpus = _compute_corpus_metrics(own, own_items, [items[i] for i in indices])
        metrics |= {start + name: value for name, value in corpus.items()}
        if source:
            metrics[f"{source}/answered"] = _get_answered(own_items)
            parts[start + own.primary_metric] = own.lower_is_better
        is_corpus = own.primary_metric in corpus
        for name in ("", *([] if is_corpus else list_sample_metrics(count))):
            # It is undefined on every example if, for example, every reward failed.
            value = metrics.setdefault(start + (name or own.primary_metric), math.nan)
            column = {} if is_corpus else columns.get(start + (name or own.primary_metric), {})
            values = [*column.values()]
            if source and own.lower_is_better:  # the mean of the sources takes 1 less an error
                value, values = 1 - value, [1 - v for v in values]
            columns_by_name.setdefault(name, []).append((value, values))
    intervals = {}
    for name, found in columns_by_name.items():
        metrics[name or task.primary_metric] = float(np.mean([value for value, _ in found]))
        samples = [values for _, values in found]
        intervals[name or task.primary_metric] = bootstrap_interval(*samples, seed=seed)
    known = task.primary_metric, metrics, task.lower_is_better, intervals, parts, seed
    return Scored(tuple(rows), *known)


def _build_output(output: Completion, score: Score) -> Output:
    turns: Any = {"turns": output.turns} if output.turns else {}
    return turns | {
        "output": output.text,
        "answer": score.answer,
        "reward": score.total,
        "rewards": dict(score.rewards),
        "metrics": dict(score.metrics),
    }


def _get_answered(scores: Sequence[Score]) -> float:
    return float(np.mean([has_answer(score.answer) for score in scores]))


def has_answer(answer: Any) -> bool:
    """Return whether a parsed answer is one; an empty text is none."""
    return answer is not None and not (isinstance(answer, str) and not answer)


def _compute_corpus_metrics(
    task: Task, scores: Sequence[Score], examples: Sequence[Example]
) -> dict[str, float]:
    try:
        return task.corpus_metrics([score.answer for score in scores], examples)
    except FAILURES:  # a user's metric may raise anything; the run must continue
        logger.warning("the corpus metrics failed and are skipped", exc_info=True)
        return {}
