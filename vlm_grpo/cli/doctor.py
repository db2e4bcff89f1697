"""``vlm-grpo doctor``: check that a model gives the same results with a shared prompt pass."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def doctor(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub name, folder of a model, or embedded.")
    ],
    image: Annotated[Path | None, typer.Option(help="Image of the prompt; default: noise.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="dtype of the weights.")
    ] = "float32",
) -> None:
    """Check a model: compare the shared prompt pass with the repeated one on this model.

    Prints the model's family, its coordinate frame, the number of prompt tokens, the attention
    kernels, and which form training will use; if the log-probabilities differ, by how much.

    \b
    vlm-grpo doctor embedded
    vlm-grpo doctor Qwen/Qwen2.5-VL-3B-Instruct --image photo.jpg --dtype bfloat16
    """
    from vlm_grpo.config.data import PILLOW_WARNS_AT
    from vlm_grpo.dist.launch import initialize_distributed
    from vlm_grpo.eval.predict import read_image
    from vlm_grpo.model.doctor import diagnose

    reference = None if image is None else read_image(image, PILLOW_WARNS_AT)
    for line in diagnose(model, reference, dtype, str(initialize_distributed().device)):
        typer.echo(line)
