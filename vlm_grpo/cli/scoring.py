"""``vlm-grpo evaluate TASK --predictions FILE``: a task's rewards of the outputs of any model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from vlm_grpo.benchmarks.adapter import build_benchmark_task
from vlm_grpo.cli.common import parse_task_options
from vlm_grpo.config.data import DataSettings
from vlm_grpo.errors import UserError
from vlm_grpo.eval.benchmark import format_unread
from vlm_grpo.eval.evaluate import score_outputs
from vlm_grpo.eval.scored import Scored, format_row, has_answer
from vlm_grpo.task.coordinates import ORIGINAL, CoordinateFrame
from vlm_grpo.task.registry import build_task, load_task_class

_MAX_TABLE_ROWS = 50


def print_scores(
    name: str,
    options: Sequence[str],
    data: DataSettings,
    predictions: tuple[Path, str | None],
    frame: CoordinateFrame | None,
    tags: bool | None,
    as_json: bool,
) -> None:
    """Score the output of every example by a task, and print the scores.

    Args:
        name: the task.
        options: ``OPTION=VALUE`` of the task, except ``tags`` and ``frame``.
        data: source, image root and limits of the examples.
        predictions: the file, and its layout, as for ``read_outputs``.
        frame: coordinate frame of the boxes; None: pixels of the original image.
        tags: read answers from the tags only, or from the full output only; None: from the tags of
            outputs that have them.
        as_json: print one JSON object per row, then the total, instead of a table.
    """
    values = parse_task_options(options)
    for option, flag in {"tags": "--tags or --no-tags", "frame": "--frame"}.items():
        if option in values:
            raise UserError(f"{option} is not a task option with --predictions: use {flag}")
    task_class = load_task_class(name)
    if tags is None:
        task_class = build_benchmark_task(task_class)  # reads an answer with and without tags
    task = build_task(task_class, name, values | {"tags": bool(tags), "frame": frame or ORIGINAL})
    scored, unanswered = score_outputs(task, data, *predictions)
    total = _summarize(scored)
    if as_json:
        for row in scored.rows:
            print(format_row({key: row[key] for key in ("id", "answer", "rewards", "metrics")}))
        print(json.dumps({"total": total}, ensure_ascii=False))
    else:
        _print_table(scored, total, unanswered)


def _summarize(scored: Scored) -> dict[str, Any]:
    def get_means(key: str) -> dict[str, float | None]:
        return {name: _mean(scored.get_column(name)) for name in scored.rows[0][key]}

    return {
        "n": scored.n,
        "answered": sum(has_answer(row["answer"]) for row in scored.rows),
        "unscorable": scored.metrics["unscorable"],
        "reward": _mean([row["reward"] for row in scored.rows]),
        "rewards": get_means("rewards"),
        "metrics": get_means("metrics"),
        "corpus": {name: value for name, value in scored.corpus.items() if value == value},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if all are."""
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _print_table(scored: Scored, total: dict[str, Any], unanswered: int) -> None:
    """Print the first rows and the total; ``unanswered`` more examples have no output."""
    names = [*total["rewards"], *total["metrics"]]
    table = Table("id", "answer", *names)
    for row in scored.rows[:_MAX_TABLE_ROWS]:
        values = {**row["rewards"], **row["metrics"]}
        answer = "no answer" if row["answer"] is None else str(row["answer"])
        table.add_row(row["id"], answer[:60], *(_format(values[name]) for name in names))
    if (more := scored.n - _MAX_TABLE_ROWS) > 0:
        table.add_row("…", f"{more} more; --json shows all")
    table.add_section()
    means = [*total["rewards"].values(), *total["metrics"].values()]
    table.add_row(f"all {total['n']}", f"{total['answered']} answered", *map(_format, means))
    console = Console()
    console.print(table, markup=False)
    for name, value in total["corpus"].items():
        console.print(f"{name} {_format(value)}", markup=False)
    if unanswered:
        console.print(f"{unanswered} more examples have no output in the file")
    if (unread := format_unread(scored)) is not None:
        console.print(f"{unread}: see --tags and --frame", markup=False)
    if total["unscorable"]:
        console.print(
            f"{total['unscorable']} outputs could not be scored: a reward failed or took too long"
        )


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
