"""``vlm-grpo predict``: ask a model, and see its answer on the image."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image

from vlm_grpo.errors import UserError


def predict(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub name, folder, run, checkpoint, or embedded."),
    ],
    question: Annotated[str, typer.Option(help="What to ask; for grounding the object alone.")],
    image: Annotated[list[Path], typer.Option(help="An image; several times for several images.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings over those of the run."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Task that words the question and reads the answer; else the run's own."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Picture to write; else IMAGE-answer.png here.")
    ] = None,
) -> None:
    """Ask a model one question; print its answer and draw it on the image.

    A checkpoint is asked as it was trained: with its adapter, pixel budget, task and wording.

    \b
    vlm-grpo predict embedded --image photo.png --question "How many red circles are there?"
    vlm-grpo predict runs/grounding --image photo.jpg --question "the red cup" --out cup.png
    vlm-grpo predict Qwen/Qwen2.5-VL-3B-Instruct --task grounding --image a.jpg --question "a cup"
    vlm-grpo predict runs/mine/checkpoints/step-300 evaluation.temperature=0.7 seed=1 \\
        --image a.jpg --question "How many cups?"
    """
    picture = _free(out, image[0])
    # Loaded here because a model's libraries take seconds, which no other command should cost.
    module = importlib.import_module("vlm_grpo.deploy.predict")
    found = module.predict(model, image, question, task, overrides or ())
    found.picture.save(picture)
    completion = found.completion
    typer.echo(f"output   {completion.text}")
    if completion.stop == "length":
        typer.echo(
            f"         cut off after {len(completion.token_ids)} tokens: "
            "raise rollout.max_completion_length"
        )
    if found.has_task:
        typer.echo(
            f"answer   {'none: the task reads no answer' if found.answer is None else found.answer}"
        )
    typer.echo(f"picture  {picture}")


def _free(out: Path | None, image: Path) -> Path:
    """``out``, or ``IMAGE-answer.png`` in the current folder with the first free number."""
    if out is not None:
        if out.exists():
            raise UserError(f"{out} exists already: give another name by --out")
        if not out.parent.is_dir():
            raise UserError(f"--out {out}: there is no folder {out.parent}")
        if out.suffix.lower() not in Image.registered_extensions():
            raise UserError(f"--out {out}: end the name in .png, .jpg or .webp")
        return out
    out, number = Path(f"{image.stem}-answer.png"), 1
    while out.exists():
        number += 1
        out = Path(f"{image.stem}-answer-{number}.png")
    return out
