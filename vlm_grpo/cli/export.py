"""``vlm-grpo export``: write a trained checkpoint as a model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Folder or name of a run, or folder of a checkpoint."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter only.")
    ] = False,
    step: Annotated[
        str | None, typer.Option(help="Step of the checkpoint, or best; default: the newest.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; default: the dtype of the original model."),
    ] = None,
) -> None:
    """Write a trained model in the format of transformers and vLLM, with a model card.

    Adapters are merged into the weights. The processor is saved with the pixel budget of the
    training.

    \b
    vlm-grpo export counting exported
    vlm-grpo export runs/mine exported --step best --dtype bfloat16
    vlm-grpo export runs/mine/checkpoints/step-300 adapter --adapter
    """
    from vlm_grpo.deploy import export

    typer.echo(f"model in {export.export(run, out, adapter, step, dtype)}")
