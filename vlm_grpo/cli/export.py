"""``vlm-grpo export``: a trained checkpoint as a model for other programs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.errors import UserError


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder or name, or a checkpoint's folder.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone.")] = False,
    step: Annotated[
        str | None, typer.Option(help="The checkpoint's step, or best; else the newest.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; else the precision of the original model."),
    ] = None,
) -> None:
    """Write a trained model's folder, as transformers and vLLM load it, with a model card.

    Adapters are merged into the weights. The processor carries the pixel budget of the training.

    \b
    vlm-grpo export counting exported
    vlm-grpo export runs/mine exported --step best --dtype bfloat16
    vlm-grpo export runs/mine/checkpoints/step-300 adapter --adapter
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise UserError(f"--dtype is {dtype!r}; it is float32 or bfloat16")
    if step is not None and step != "best" and not step.isdecimal():
        raise UserError(f"--step is {step!r}; it is a number of steps, or best")
    number = int(step) if step is not None and step != "best" else step
    module = importlib.import_module("vlm_grpo.deploy.export")
    typer.echo(f"model in {module.export(run, out, adapter, number, dtype)}")
