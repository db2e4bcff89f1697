"""``vlm-grpo predict``: generate one answer and draw it on the image."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.cli.common import (
    FrameName,
    Overrides,
    ServedModelName,
    ServerUrl,
    build_endpoint,
    find_weights,
)
from vlm_grpo.errors import UserError


def predict(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub name, folder, run, checkpoint, or embedded.")
    ],
    question: Annotated[
        str, typer.Option(help="The question; for grounding, the object's description.")
    ],
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            "--video",
            help="An image, a video file or a folder of a video's frames; repeat it for several.",
        ),
    ] = None,
    overrides: Overrides = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Task that builds the prompt and parses the answer; default: the run's task."
        ),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(help="A row's answer as JSON, if the prompt shows a part of it (choice)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Image file to write; default: IMAGE-answer.png here.")
    ] = None,
    server: ServerUrl = None,
    served_model: ServedModelName = None,
    frame: FrameName = None,
) -> None:
    """Answer one question; print the answer and draw it on the image, if there is one.

    A checkpoint is run as it was trained: with its adapter, pixel budget, task and prompt.

    \b
    vlm-grpo predict embedded --image photo.png --question "How many red circles are there?"
    vlm-grpo predict runs/grounding --image photo.jpg --question "the red cup" --out cup.png
    vlm-grpo predict Qwen/Qwen2.5-VL-3B-Instruct --task grounding --image a.jpg --question "a cup"
    vlm-grpo predict runs/mine/checkpoints/step-300 evaluation.temperature=0.7 seed=1 \\
        --image a.jpg --question "How many cups?"
    vlm-grpo predict runs/mine --server http://localhost:8000 --image a.jpg --question "a cup"
    vlm-grpo predict runs/pets --image a.jpg --question "Which animal is this?" \\
        --answer '{"options": ["cat", "dog"], "answer": "cat"}'
    vlm-grpo predict Qwen/Qwen2.5-VL-3B-Instruct --task temporal --video a.mp4 \\
        --question "the person sits down"
    vlm-grpo predict none --server https://api.openai.com/v1 --served-model gpt-4o --image a.jpg \\
        --question "How many cups?"
    """
    images = image or []
    if out is not None and not images:
        raise UserError("--out needs an image to draw on: add --image")
    picture = _choose_file(out, images[0]) if images else None
    try:
        row_answer = None if answer is None else json.loads(answer)
    except ValueError as error:
        raise UserError(f"--answer {answer}: it is no JSON ({error})") from error
    endpoint = build_endpoint(context.params, frame)
    from vlm_grpo.eval.predict import Predictor

    weights = find_weights(model) if endpoint is None else model
    predictor = Predictor(weights, task, overrides or (), endpoint)
    prediction = predictor(images, question, row_answer)
    completion = prediction.completion
    for turn in completion.turns[:-1]:
        read = "" if turn.observed is None else turn.observed.text
        typer.echo(f"turn     {turn.text}\n         read: {read}")
    typer.echo(f"output   {completion.text}")
    if completion.stop == "length":
        typer.echo(
            f"         truncated after {predictor.settings.rollout.max_completion_length} tokens: "
            "raise rollout.max_completion_length"
        )
    if prediction.has_task:
        found = prediction.answer
        typer.echo(f"answer   {'none: the output holds no answer' if found is None else found}")
    if picture is not None and prediction.picture is not None:
        prediction.picture.save(picture)
        typer.echo(f"picture  {picture}")


def _choose_file(out: Path | None, image: Path) -> Path:
    """Return ``out``, or ``IMAGE-answer.png`` in the current folder with the first free number."""
    if out is not None:
        from PIL import Image

        if out.exists():
            raise UserError(f"{out} exists already: give another name with --out")
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
