"""``vlm-grpo new-task``: write a new task from a template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.cli.task_template import write_task

EXAMPLE_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
"""A model that fits on one GPU with adapters."""


def new_task(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the task, for example read_clock.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path(),
) -> None:
    """Write a new task and its test from a template.

    \b
    vlm-grpo new-task read_clock
    vlm-grpo new-task read_clock --out my_tasks
    """
    file, test = write_task(name, out)
    typer.echo(f"wrote {file} and {test}; next:")
    typer.echo(f"  python -m pytest {test}")
    typer.echo(f"  vlm-grpo validate {file} --data YOUR.jsonl")
    typer.echo(f"  vlm-grpo train {file} model={EXAMPLE_MODEL} \\")
    typer.echo("      data.train=YOUR.jsonl data.eval=HELD_OUT.jsonl \\")
    typer.echo("      policy.lora.r=64 optim.lr=1e-5")
