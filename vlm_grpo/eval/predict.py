"""Answer a question about images and clips, and draw the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_grpo.config.data import VideoSettings
from vlm_grpo.config.recipes import Overrides
from vlm_grpo.config.run import Settings
from vlm_grpo.data.images import VIDEO_SUFFIXES, Clip, MediaReader
from vlm_grpo.data.messages import read_question
from vlm_grpo.data.mixed_task import Mixed, load_run_task
from vlm_grpo.errors import UserError
from vlm_grpo.eval.models import EvaluatedModel, load_evaluated_model
from vlm_grpo.model.episodes import begin_episodes
from vlm_grpo.model.resolve import NO_TASK, resolve_model
from vlm_grpo.serve.chat_client import Endpoint
from vlm_grpo.task import FAILURES, PlainQuestion, Task, write_prompt
from vlm_grpo.task.drawing import PREDICTED_COLOR, draw_caption
from vlm_grpo.task.registry import get_task_name, load_task
from vlm_grpo.types import Completion, Example, ImageRef
from vlm_grpo.utils import trust

ImageInput = str | Path | bytes | Image.Image | Clip
"""An image or a clip: the path of either (of a clip also a folder of frames), the encoded bytes of
an image, a PIL image, or a ``Clip`` of other forms."""


@dataclass(frozen=True)
class Prediction:
    """A model's answer to one question."""

    completion: Completion  # the generated tokens and text, and why generation ended
    has_task: bool  # a task parsed the answer; False: the text itself is the answer
    answer: Any  # the parsed answer; None: the text contains none
    # width and height of each image, or of a clip's frames, after the model's resize
    resized_sizes: tuple[tuple[int, int], ...]
    # a copy of the first image, or of frames of a clip side by side, with the answer drawn on it
    picture: Image.Image | None

    @property
    def text(self) -> str:
        """The model's full output."""
        return self.completion.text


class Predictor:
    """A model that answers questions about images; its weights are loaded at the first question.

    A trained model is used as in training: with its adapter, pixel budget, task and prompt.

    Args:
        model: as for ``resolve_model``; or ``none`` for a server's model of which nothing is known.
        task: the task that builds the prompt and parses the answer; None: the run's task, or the
            question alone if the model was not trained by a run.
        overrides: as for ``load_settings``; they override the settings of the run.
        server: address of the model, whose weights are then not loaded here.

    Raises:
        UserError: there is no such model or task.
    """

    def __init__(
        self,
        model: str | Path,
        task: str | type[Task] | Task | None = None,
        overrides: Overrides = (),
        server: Endpoint | str | None = None,
    ) -> None:
        choice = resolve_model(str(model), overrides, server is not None)
        once = choice.settings.evaluation.model_copy(update={"samples": 1})
        self.settings = choice.settings.model_copy(update={"evaluation": once})
        self.checkpoint, self.server = choice.checkpoint, server
        self._task = _load_task(task, choice.settings)

    @cached_property
    def model(self) -> EvaluatedModel:
        return load_evaluated_model(self.settings, self.checkpoint, self.server)

    @cached_property
    def task(self) -> Task:
        return self.model.prompts.adapt(self._task)

    def __call__(
        self, images: ImageInput | Sequence[ImageInput], question: str, answer: Any = None
    ) -> Prediction:
        """Answer a question, sampled at ``evaluation.temperature``.

        Args:
            images: one image or clip, several, or ``()`` for text alone; the answer is drawn on the
                first.
            question: the question, in which each ``<image>`` stands for an image and each
                ``<video>`` for a clip; without any, they stand before it. For grounding, only the
                object's description.
            answer: the row's answer, of which some prompts show a part, as ``choice`` its options.

        Raises:
            UserError: an image, the question or the model cannot be used, or the task's parser
                fails.
        """
        if not isinstance(question, str):
            raise UserError(f"question must be text, not {type(question).__name__}")
        if isinstance(images, str | bytes) or not isinstance(images, Sequence):
            images = [images]
        try:
            chat = read_question(question, [_recognize_clip(image) for image in images])
        except ValueError as error:
            raise UserError(f"the question cannot be used: {error}") from error
        question, data = chat.turns[0].text, self.settings.data
        references = tuple(
            read_image(image, data.max_image_pixels, data.video) for image in chat.images
        )
        try:
            example = self.model.prompts.with_resized_sizes(
                Example("question", references, question, answer)
            )
        except ValueError as error:
            name = references[0].name
            raise UserError(f"image {name} cannot be resized for the model: {error}") from error
        seeds = [(self.settings.seed, "predict")]
        begun = begin_episodes(self.model.prompts, self.model.runner, example, self.task)
        if answer is None:
            try:
                write_prompt(self.task, begun[0])
            except ValueError as error:
                raise UserError(
                    f"{error}; if it shows a part of a row's answer, as choice its options, give "
                    "one: --answer JSON (in Python, answer=…)"
                ) from error
        ((_, (completion,)),) = self.model.generate(self.task, [begun], seeds, [range(1)])
        example = begun[0]
        try:
            found = self.task.read(completion.text, example)
        except FAILURES as error:  # a user's parser may raise anything
            raise UserError(
                f"the task's parser failed on {completion.text!r}: {error!r}"
            ) from error
        return Prediction(
            completion,
            not isinstance(self.task, PlainQuestion),
            found,
            tuple(image.resized_size for image in example.images),
            _draw(self.task, example, found, completion.text) if references else None,
        )


def predict(
    model: str | Path,
    images: ImageInput | Sequence[ImageInput],
    question: str,
    task: str | type[Task] | Task | None = None,
    overrides: Overrides = (),
    server: Endpoint | str | None = None,
    answer: Any = None,
) -> Prediction:
    """Answer one question; a ``Predictor`` answers several without loading the model again.

    Arguments and errors are those of ``Predictor`` and its call.
    """
    return Predictor(model, task, overrides, server)(images, question, answer)


def _load_task(task: str | type[Task] | Task | None, settings: Settings) -> Task:
    if isinstance(task, Task):
        return task
    trust.allow(task)
    if task is None and settings.task == NO_TASK:
        return PlainQuestion()
    if settings.is_mixture and isinstance(mixed := load_run_task(settings), Mixed):
        if task in mixed.members:
            return mixed.members[str(task)]
        if task is None:
            raise UserError(
                "the model was trained on several sources, each with its task: name one by --task "
                f"(in Python, task=…): {', '.join(mixed.members)}"
            )
    name = get_task_name(task) if isinstance(task, type) else str(task or settings.task)
    options = settings.task_options
    if settings.task not in (name, NO_TASK):  # every task has these options
        options = {key: options[key] for key in ("tags", "thinking") if key in options}
    return load_task(task or settings.task, **options)


def read_image(image: ImageInput, max_pixels: int, video: VideoSettings | None = None) -> ImageRef:
    """Read the image or the clip of a question; ``UserError``: it cannot be, or is too large."""
    name, roots, data = "of the question", (), image
    if isinstance(image, str | Path):
        name = str(image)
    try:
        if isinstance(image, Clip):
            roots = Path.cwd(), Path(Path.cwd().anchor)
        elif isinstance(image, str | Path):
            data = Path(image).read_bytes()
        return MediaReader(roots, max_pixels, video).read(data, name)
    except OSError as error:
        raise UserError(f"image {name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def _recognize_clip(value: Any) -> Any:
    if isinstance(value, str | Path):
        path = Path(value)
        if path.suffix.lower() in VIDEO_SUFFIXES or path.is_dir():
            return Clip(path.absolute())
    return value


def _draw(task: Task, example: Example, answer: Any, text: str) -> Image.Image:
    # A task that draws nothing has the text below the image.
    image = task.target_image(example).load()
    if answer is not None:
        drawn = task.draw(image, answer, example, PREDICTED_COLOR)
        if drawn.tobytes() != image.tobytes():
            return drawn
    return draw_caption(image, text, PREDICTED_COLOR)
