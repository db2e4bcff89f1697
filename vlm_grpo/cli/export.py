"""``vlm-grpo export``: write a trained checkpoint as a model for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.cli.common import find_weights


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
) -> None:
    """Write a trained model in the format of transformers and vLLM, with a model card.

    Adapters are merged into the weights. The processor is saved with the pixel budget of the
    training.

    \b
    vlm-grpo export counting exported
    vlm-grpo export runs/mine@best exported --dtype bfloat16
    vlm-grpo export runs/mine/checkpoints/step-300 adapter --adapter
    """
    from vlm_grpo.errors import UserError
    from vlm_grpo.training import export

    if adapter and dequantized:
        raise UserError("--adapter writes no base weights: leave out --dequantized")
    weights = "adapter" if adapter else "dequantized" if dequantized else "merged"
    folder = export.export(find_weights(run), out, weights, dtype)
    typer.echo(f"model in {folder}\nupload it with hf upload OWNER/NAME {folder}")
