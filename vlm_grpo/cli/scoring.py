"""``vlm-grpo evaluate TASK --predictions FILE``: a task's rewards of the outputs of any model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from vlm_grpo.benchmarks.adapter import build_benchmark_task
from vlm_grpo.cli.common import parse_task_options
from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.errors import UserError
from vlm_grpo.eval.benchmark_report import find_unread, format_unread
from vlm_grpo.eval.foreign import PREDICTIONS, read_outputs
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import ORIGINAL, RESIZED, CoordinateFrame
from vlm_grpo.task.registry import build_task, load_task_class
from vlm_grpo.task.scorer import FailureGuard, RewardScorer
from vlm_grpo.types import Example, Score

_MAX_TABLE_ROWS = 50


@dataclass(frozen=True)
class Report:
    """Scores of all outputs, and their means.

    Attributes:
        examples: the dataset's rows that have an output.
        scores: one score per example.
        total: ``n``, ``answered``, ``unscorable``, the mean ``reward``, means of ``rewards`` and
            ``metrics`` by name, and the task's ``corpus`` metrics.
        unanswered: number of rows of the dataset for which the file of another project has no
            output.
        unread: an output without an answer; None: most outputs have one.
    """

    examples: Sequence[Example]
    scores: Sequence[Score]
    total: Mapping[str, Any]
    unanswered: int = 0
    unread: str | None = None


def score_predictions(
    name: str,
    options: Sequence[str],
    data: DataSettings,
    predictions: tuple[str | None, Path],
    frame: CoordinateFrame | None = None,
    tags: bool | None = None,
) -> Report:
    """Score the output of every example.

    Args:
        name: the task.
        options: ``OPTION=VALUE`` of the task, except ``tags`` and ``frame``.
        data: source, image root and limits of the examples.
        predictions: the layout, as for ``read_outputs``, and the file.
        frame: coordinate frame of the boxes; None: pixels of the original image.
        tags: read answers from the tags only, or from the full output only; None: from the tags of
            outputs that have them.

    Raises:
        UserError: data or predictions are malformed or do not match, or a reward fails on all.
    """
    values = parse_task_options(options)
    for option, flag in {"tags": "--tags or --no-tags", "frame": "--frame"}.items():
        if option in values:
            raise UserError(f"{option} is not a task option with --predictions: use {flag}")
    task_class = load_task_class(name)
    if tags is None:
        task_class = build_benchmark_task(task_class)  # reads an answer with and without tags
    task = build_task(task_class, name, values | {"tags": bool(tags), "frame": frame or ORIGINAL})
    layout, path = predictions
    loaded = load_examples(data.train, task, data)
    examples, texts = read_outputs(layout or PREDICTIONS, path, loaded, task.frame == RESIZED)
    with RewardScorer() as scorer:
        scores = scorer(task, texts, examples)
    FailureGuard().check(task, scores, examples)
    total = _summarize(task, examples, scores)
    missing = len(loaded) - len(examples)
    return Report(examples, scores, total, missing, find_unread(texts, scores))


def print_json(report: Report) -> None:
    """Print one JSON object per row, then the total."""
    for example, score in zip(report.examples, report.scores, strict=True):
        row = {
            "id": example.id,
            "answer": score.answer,
            "rewards": dict(score.rewards),
            "metrics": dict(score.metrics),
        }
        print(json.dumps(row, ensure_ascii=False, default=_to_json))
    print(json.dumps({"total": report.total}, ensure_ascii=False))


def print_table(report: Report) -> None:
    """Print the first rows and the total as a table."""
    rewards, metrics = report.total["rewards"], report.total["metrics"]
    table = Table("id", "answer", *rewards, *metrics)
    for example, score in list(zip(report.examples, report.scores, strict=True))[:_MAX_TABLE_ROWS]:
        values = [*score.rewards.values(), *score.metrics.values()]
        answer = "no answer" if score.answer is None else str(score.answer)
        table.add_row(example.id, answer[:60], *map(_format, values))
    if (more := len(report.examples) - _MAX_TABLE_ROWS) > 0:
        table.add_row("…", f"{more} more; --json shows all")
    table.add_section()
    total = report.total
    means = [*rewards.values(), *metrics.values()]
    table.add_row(f"all {total['n']}", f"{total['answered']} answered", *map(_format, means))
    console = Console()
    console.print(table, markup=False)
    for name, value in total["corpus"].items():
        console.print(f"{name} {_format(value)}", markup=False)
    if report.unanswered:
        console.print(f"{report.unanswered} more examples have no output in the file")
    if report.unread is not None:
        console.print(f"{format_unread(report.unread)}: see --tags and --frame", markup=False)
    if total["unscorable"]:
        console.print(
            f"{total['unscorable']} outputs could not be scored: a reward failed or took too long"
        )


def _summarize(task: Task, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, Any]:
    def means(values: Callable[[Score], Mapping[str, float | None]]) -> dict[str, float | None]:
        return {name: _mean(values(score)[name] for score in scores) for name in values(scores[0])}

    return {
        "n": len(scores),
        "answered": sum(score.answer is not None for score in scores),
        "unscorable": sum(score.total is None for score in scores),
        "reward": _mean(score.total for score in scores),
        "rewards": means(lambda score: score.rewards),
        "metrics": means(lambda score: score.metrics),
        "corpus": task.corpus_metrics([score.answer for score in scores], examples),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _to_json(value: Any) -> Any:
    """Convert an answer, which may be any type, to a JSON type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    return str(value)
