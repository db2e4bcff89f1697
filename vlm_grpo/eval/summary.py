"""The scores of an evaluation: means, corpus metrics and the interval of the primary metric."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vlm_grpo.data.loading import Mixed
from vlm_grpo.eval.several import list_sample_metrics, merge_scores
from vlm_grpo.eval.statistics import bootstrap_mean_of_means, format_value
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.task.scorer import group_by_source
from vlm_grpo.types import Example, Score
from vlm_grpo.utils.atomic_io import write_atomic

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Scores of n examples, with one or several outputs each.

    Attributes:
        primary_metric: name of the task's primary metric.
        n: number of examples.
        metrics: mean of every reward and metric by name, over the examples where it is defined,
            and the task's corpus metrics; ``answered`` is the share of outputs with an answer,
            ``unscorable`` the number of outputs on which a weighted reward failed.
        interval: 95 % bootstrap interval of the primary metric's mean; NaN for a corpus metric.
        rows: id, output, answer, rewards and metrics of each example; with several outputs, these
            are the first output and the means, and "samples" has every output with its own.
        lower_is_better: the primary metric is an error.
        path: file of the predictions; None: they were not written.
        intervals: 95 % bootstrap intervals, over the examples, of the metrics of several samples.
    """

    primary_metric: str
    n: int
    metrics: dict[str, float]
    interval: tuple[float, float]
    rows: tuple[dict, ...]
    lower_is_better: bool = False
    path: Path | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Value of the primary metric."""
        return self.metrics[self.primary_metric]

    def is_better_than(self, other: float | None) -> bool:
        """Return whether the primary metric is better than ``other``; every number beats None."""
        if math.isnan(self.value):
            return False
        if other is None:
            return True
        return self.value < other if self.lower_is_better else self.value > other

    def __str__(self) -> str:
        value, low, high = (
            format_value(v, self.lower_is_better) for v in (self.value, *self.interval)
        )
        interval = "" if math.isnan(self.interval[0]) else f" [{low}, {high}]"
        return f"{self.primary_metric} {value}{interval} (n = {self.n})"


def summarize(
    task: Task,
    examples: Sequence[Example],
    texts: Sequence[str],
    scores: Sequence[Score],
    seed: int,
) -> Evaluation:
    """Compute the means of scores and their intervals.

    Args:
        task: the task that scored the outputs.
        examples: the examples.
        texts: the outputs, as many of each example, one example after the other.
        scores: score of each output.
        seed: seed of the bootstrap.
    """
    count = len(texts) // len(examples)
    items = [example for example in examples for _ in range(count)]
    own_scores = [scores[start : start + count] for start in range(0, len(scores), count)]
    pairs = zip(examples, own_scores, strict=True)
    merged = [merge_scores(task, example, own) for example, own in pairs]
    columns: dict[str, list[float]] = {}
    for score in merged:
        for name, value in (*score.rewards.items(), *score.metrics.items()):
            columns.setdefault(name, [])
            if value is not None:
                columns[name].append(value)
    metrics = {name: float(np.mean(values)) for name, values in columns.items() if values}
    metrics["answered"] = float(np.mean([score.answer is not None for score in scores]))
    metrics["unscorable"] = sum(score.total is None for score in scores)
    # The values by source of the primary metric, which has no name here, and of those of samples.
    parts: dict[str, list[tuple[float, list[float]]]] = {}
    for source, own, indices in group_by_source(task, items):
        start = f"{source}/" if source else ""
        answers = [scores[i].answer for i in indices]
        corpus = _compute_corpus_metrics(own, answers, [items[i] for i in indices])
        metrics |= {start + name: value for name, value in corpus.items()}
        if source:
            metrics[f"{source}/answered"] = float(np.mean([a is not None for a in answers]))
        is_turned = isinstance(task, Mixed) and own.lower_is_better
        # A corpus metric may have values of examples too, but it is not their mean.
        is_corpus = own.primary_metric in corpus
        for name in ("", *([] if is_corpus else list_sample_metrics(count))):
            # It is undefined on every example if, for example, every reward failed.
            value = metrics.setdefault(start + (name or own.primary_metric), math.nan)
            values = [] if is_corpus else columns.get(start + (name or own.primary_metric), [])
            part = (1 - value, [1 - v for v in values]) if is_turned else (value, values)
            parts.setdefault(name, []).append(part)
    intervals = {}
    for name, found in parts.items():
        metrics[name or task.primary_metric] = float(np.mean([value for value, _ in found]))
        intervals[name] = bootstrap_mean_of_means([values for _, values in found], seed)
    rows = []
    for number, (example, score) in enumerate(zip(examples, merged, strict=True)):
        own = slice(number * count, (number + 1) * count)
        samples = [_format_score(*pair) for pair in zip(texts[own], scores[own], strict=True)]
        source = {"source": example.source} if example.source else {}
        row = {"id": example.id, **source, **_format_score(texts[own.start], score)}
        rows.append(row | ({"samples": samples} if count > 1 else {}))
    return Evaluation(
        task.primary_metric,
        len(examples),
        metrics,
        intervals.pop(""),
        tuple(rows),
        task.lower_is_better,
        intervals=intervals,
    )


def _format_score(text: str, score: Score) -> dict[str, Any]:
    """Return the part of a row about an output."""
    return {
        "output": text,
        "answer": score.answer,
        "rewards": dict(score.rewards),
        "metrics": dict(score.metrics),
    }


def _compute_corpus_metrics(
    task: Task, answers: Sequence[Any | None], examples: Sequence[Example]
) -> dict[str, float]:
    try:
        return task.corpus_metrics(answers, examples)
    except FAILURES:  # a user's metric may raise anything; the run must continue
        logger.warning("the corpus metrics failed and are skipped", exc_info=True)
        return {}


def write_predictions(path: Path, evaluation: Evaluation) -> None:
    """Write one line per example with its output, answer, rewards and metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in evaluation.rows)
    write_atomic(path, "".join(lines).encode(errors="backslashreplace"))


def write_summary(path: Path, evaluation: Evaluation) -> None:
    """Write the means, including corpus metrics, which the file of predictions does not have."""
    summary = {
        "headline": evaluation.primary_metric,
        "lower_is_better": evaluation.lower_is_better,
        "n": evaluation.n,
        "metrics": {k: v for k, v in evaluation.metrics.items() if math.isfinite(v)},
    }
    if evaluation.intervals:
        summary["intervals"] = evaluation.intervals
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(summary, indent=1).encode())
