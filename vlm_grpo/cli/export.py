"""``vlm-grpo export``: write a trained checkpoint as a model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder or name of a run, RUN@step, RUN@best, or folder of a checkpoint; "
            "default: the newest of the run.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter only.")
    ] = False,
    step: Annotated[str | None, typer.Option(hidden=True)] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; default: the dtype of the original model."),
    ] = None,
    dequantized: Annotated[
        bool,
        typer.Option(
            "--dequantized",
            help="Merge into the 4- or 8-bit weights of policy.load_in, dequantized, instead of "
            "the original ones.",
        ),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Upload OUT to this model repository of the hub."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Create a public repository instead of a private one.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write OUT, and print what --push would upload.")
    ] = False,
) -> None:
    """Write a trained model in the format of transformers and vLLM, with a model card.

    Adapters are merged into the weights. The processor is saved with the pixel budget of the
    training.

    \b
    vlm-grpo export counting exported
    vlm-grpo export runs/mine@best exported --dtype bfloat16
    vlm-grpo export runs/mine/checkpoints/step-300 adapter --adapter
    vlm-grpo export counting exported --push OWNER/NAME --dry-run
    """
    from vlm_grpo.errors import UserError
    from vlm_grpo.model import hub
    from vlm_grpo.training import export

    if adapter and dequantized:
        raise UserError("--adapter writes no base weights: leave out --dequantized")
    weights = "adapter" if adapter else "dequantized" if dequantized else "merged"
    if push is None and (public or dry_run):
        raise UserError("--public and --dry-run have no effect without --push NAME: add it")
    if push is not None and not dry_run:
        hub.check_pushable(push)
    typer.echo(f"model in {export.export(run, out, weights, step, dtype)}")
    if push is None:
        return
    if dry_run:
        typer.echo("\n".join(hub.describe_push(out, push, public)))
    else:
        typer.echo(f"pushed to {hub.push(out, push, public)}")
