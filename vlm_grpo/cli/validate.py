"""``vlm-grpo validate``: check a task and its data without a model."""

from __future__ import annotations

from typing import Annotated

import typer

from vlm_grpo.cli.common import (
    ImageRoot,
    MaxPixels,
    ModelName,
    TaskName,
    TaskOptions,
    load_prompts,
    parse_data_options,
)
from vlm_grpo.errors import UserError


def validate(
    task: TaskName,
    options: TaskOptions = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Examples to check it on: a file or folder, hf:NAME[:SPLIT[:CONFIG]] or "
            "embedded:NAME; default: the embedded data of the task's name."
        ),
    ] = None,
    image_root: ImageRoot = None,
    model: ModelName = None,
    max_pixels: MaxPixels = None,
) -> None:
    """Check a task and its data without a model, or with a model's processor.

    Every row must be well-formed, its prompt writable and every image readable; every gold answer
    must earn the full reward, an empty text 0, and known exploits of a reward no more than their
    bound. With --model, every prompt is built as in training, and must fit into the context.
    Settings of the prompt and of the data are written among the options.

    \b
    vlm-grpo validate counting
    vlm-grpo validate my_task.py tags=true --data train.jsonl
    vlm-grpo validate grounding --data train.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct
    vlm-grpo validate counting 'prompt.template={{ question }} Count twice.'
    """
    from vlm_grpo.cli.validation import validate_task
    from vlm_grpo.task.registry import load_task

    source = data or f"embedded:{task}"
    values, prompt, settings = parse_data_options(options, source, image_root=image_root)
    loaded = load_task(task, **values)
    if data is None and task not in ("counting", "grounding", "ocr"):
        raise UserError(f"task {task} has no embedded data: give its data by --data")
    builder = load_prompts(model, max_pixels, settings, prompt)
    for line in validate_task(loaded, source, settings, prompt, builder):
        typer.echo(line)
