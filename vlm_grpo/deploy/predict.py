"""One question to a model, and its answer drawn on the image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.run import Settings
from vlm_grpo.data.images import ImageReader
from vlm_grpo.deploy.resolve import NO_TASK, choose_model
from vlm_grpo.distributed.launch import join
from vlm_grpo.drawing import PREDICTED_COLOR, captioned
from vlm_grpo.errors import UserError
from vlm_grpo.evaluation.generate import generate
from vlm_grpo.model.policy import load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.types import Completion, Example, ImageRef


@dataclass(frozen=True)
class Question:
    """What is asked of which model.

    Attributes:
        model: as in ``choose_model``.
        images: at least one; the answer is drawn on the first.
        text: the question; for grounding the expression alone.
        task: name or file of the task that words the question and reads the answer; None: that of
            the run, or the bare question where the model is of no run.
        out: where the picture goes; None: a free name in the current folder.
        overrides: ``key=value`` over the settings of the run.
    """

    model: str
    images: tuple[Path, ...]
    text: str
    task: str | None = None
    out: Path | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What a model answered.

    Attributes:
        completion: its whole text and why it ended.
        reads: whether a task reads the answer, or the whole text stands for itself.
        answer: what it reads; None where the text holds no answer.
        resized_sizes: width and height of each image as the model saw it.
        picture: the file with the answer drawn on the first image.
    """

    completion: Completion
    reads: bool
    answer: Any
    resized_sizes: tuple[tuple[int, int], ...]
    picture: Path


class _Ask(Task):
    """Asks the question as it stands; the whole text is the answer."""

    primary_metric = "text"

    def parse(self, text: str, example: Example) -> str:
        return text


def predict(question: Question) -> Prediction:
    """Ask, and write the picture.

    The answer is drawn at ``evaluation.temperature``; the pixel budget is the checkpoint's.

    Raises:
        UserError: model, image or task cannot be used, or the picture's file exists already.
    """
    disable_progress_bar()
    out = _free(question.out, question.images[0])
    choice = choose_model(question.model, question.overrides)
    task = _task(question.task, choice.settings)
    images = tuple(_image(path, choice.settings.data.max_image_pixels) for path in question.images)
    policy = load_policy(choice.settings, choice.checkpoint, training=False)
    policy.model.to(join().device)
    task = replace(task, frame=policy.frame)
    try:
        example = policy.with_resized_sizes(Example("question", images, question.text, None))
    except ValueError as error:
        raise UserError(f"image {images[0].name} cannot be seen by the model: {error}") from error
    prompt = policy.build_prompt(example, task)
    (completion,) = generate(policy, [prompt], choice.settings, [(choice.settings.seed, "predict")])
    try:
        answer = task.read(completion.text, example)
    except FAILURES as error:  # a user's parser may raise anything
        raise UserError(f"the task's parser failed on {completion.text!r}: {error!r}") from error
    _picture(task, example, answer, completion.text).save(out)
    reads = not isinstance(task, _Ask)
    return Prediction(completion, reads, answer, tuple(i.resized_size for i in example.images), out)


def _task(name: str | None, settings: Settings) -> Task:
    """The named task; the run's own, with its options, where that is meant or none is named."""
    if name is None and settings.task == NO_TASK:
        return _Ask()
    if name is None or name == settings.task:
        return load_task(settings.task, **settings.task_options)
    # The options are the run's task's own, but for those that every task has.
    common = {"tags", "thinking"} & set(settings.task_options)
    options = settings.task_options
    if settings.task != NO_TASK:
        options = {key: options[key] for key in common}
    return load_task(name, **options)


def _image(path: Path, max_pixels: int) -> ImageRef:
    try:
        return ImageReader(None, max_pixels).read(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"image {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error


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


def _picture(task: Task, example: Example, answer: Any, text: str) -> Image.Image:
    """The first image with what the task draws; with the text below it where it draws nothing."""
    image = example.images[0].load()
    if answer is not None:
        drawn = task.draw(image, answer, example, PREDICTED_COLOR)
        if drawn.tobytes() != image.tobytes():
            return drawn
    return captioned(image, text, PREDICTED_COLOR)
