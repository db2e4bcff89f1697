"""``vlm-grpo score``: score the outputs of any model, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.cli.common import (
    FRAME_NAMES,
    ImageRoot,
    TaskName,
    TaskOptions,
    get_frame,
    parse_task_options,
)
from vlm_grpo.errors import UserError


def score(
    task: TaskName,
    data: Annotated[str, typer.Option(help="The examples, as for validate.")],
    predictions: Annotated[
        Path, typer.Option(help='JSON Lines of {"id": …, "output": …}, one per example.')
    ],
    options: TaskOptions = None,
    layout: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format of the predictions: predictions (as above), or the output of an "
            "evaluation by vlm_r1, r1_v or lmms_eval.",
        ),
    ] = "predictions",
    frame: Annotated[
        str, typer.Option(help=f"Coordinate frame of the outputs' boxes: {FRAME_NAMES}.")
    ] = "original",
    tags: Annotated[
        bool | None,
        typer.Option(
            help="Read answers from <answer> tags only, or from the full output only; default: "
            "from the tags of outputs that have them."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
    image_root: ImageRoot = None,
) -> None:
    """Score the outputs of any model, offline.

    \b
    vlm-grpo score counting --data test.jsonl --predictions out.jsonl
    vlm-grpo score grounding --data test.jsonl --predictions out.jsonl --frame permille
    vlm-grpo score ocr --data test.jsonl --predictions out.jsonl --json > scores.jsonl

    These are the task's rewards and metrics. For the official metric of a public benchmark use
    vlm-grpo evaluate BENCHMARK --predictions.

    With --frame resized every prediction also has "seen": [[width, height]], the size in pixels
    to which the model resized each image.

    \b
    vlm-grpo score grounding --data test.jsonl --predictions rec_results_500.json --format vlm_r1 \\
        --frame resized
    """
    from vlm_grpo.benchmarks.adapter import build_benchmark_task
    from vlm_grpo.cli.scoring import print_json, print_table, score_predictions
    from vlm_grpo.config.data import DataSettings
    from vlm_grpo.task.registry import build_task, load_task_class

    values = parse_task_options(options)
    for name, flag in {"tags": "--tags or --no-tags", "frame": "--frame"}.items():
        if name in values:
            raise UserError(f"{name} is not a task option of score: use {flag}")
    task_class = load_task_class(task)
    if tags is None:
        task_class = build_benchmark_task(task_class)  # reads an answer with and without tags
    values |= {"tags": bool(tags), "frame": get_frame(frame)}
    loaded = build_task(task_class, task, values)
    settings = DataSettings(train=data, image_root=image_root)
    report = score_predictions(loaded, data, predictions, settings, layout)
    (print_json if as_json else print_table)(report)
