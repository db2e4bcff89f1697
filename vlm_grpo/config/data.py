"""The settings of a run's data: its sources, and how bad rows are treated."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticSerializationError, to_jsonable_python

from vlm_grpo.config.filter import Filter
from vlm_grpo.config.methods import CurriculumSettings
from vlm_grpo.config.section import FREE, SAME_ROWS, Frozen
from vlm_grpo.task.registry import get_short_name

Column = Literal["id", "images", "videos", "question", "answer", "messages", "task"]
Split = Literal["train", "eval"]
BoxFormat = Literal["xyxy", "xywh", "cxcywh", "yxyx"]

PYTHON = "python"
"""The source whose rows, or the task whose object, is an argument of ``train``."""
PILLOW_WARNS_AT = 89_478_485
"""Number of pixels above which Pillow warns of a decompression bomb."""


def _check_task(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    raise ValueError("should be text: give an object as an argument, train(settings, task=…)")


def _check_source(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, dict) and "hf" in value:  # YAML reads "hf: x" and "hf:" as a mapping
        raise ValueError("names no dataset: write hf:NAME[:SPLIT[:CONFIG]], without a space")
    raise ValueError(
        "should be text, or a list of sources: give rows as an argument, train(settings, data=rows)"
    )


def _check_options(value: Any) -> Any:
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError as error:
        raise ValueError(
            "should be text, numbers, lists and mappings: give the task itself as an argument, "
            "train(settings, task=…)"
        ) from error


TaskOptions = Annotated[dict[str, Any], BeforeValidator(_check_options)]
TaskSetting = Annotated[str, BeforeValidator(_check_task)]
Source = Annotated[str, BeforeValidator(_check_source)]


class VideoSettings(Frozen):
    """Which frames of a video the model gets."""

    fps: float = Field(default=2.0, gt=0)
    """Frames per second that are taken from a video file, evenly and at least 4, as in
    qwen-vl-utils; also the rate of frames that are given as images without ``fps`` or ``times``."""
    max_frames: int = Field(default=64, ge=2)
    """Maximum number of frames; of more, as many evenly spaced ones are taken."""
    max_seconds: float = Field(default=600.0, gt=0)
    """Maximum length; a row with a longer video is bad."""


class RowSettings(Frozen):
    """How rows are read: those of ``data``, or those of one of its sources in place of them."""

    image_root: Annotated[Path | None, SAME_ROWS] = None
    """Folder that contains all images and that their paths are relative to; None: the folder of
    the source, or the current folder for rows in memory."""
    columns: Annotated[dict[Column, str], SAME_ROWS] = Field(default_factory=dict)
    """Names of columns that differ from ours, such as ``{answer: solution}``."""
    box_format: Annotated[BoxFormat | None, SAME_ROWS] = None
    """What the numbers of a box in the rows are: ``xyxy`` left, top, right, bottom; ``xywh`` left,
    top, width, height; ``cxcywh`` center, width, height; ``yxyx`` top, left, bottom, right. None:
    ``xyxy``."""
    box_scale: Annotated[int | None, SAME_ROWS] = Field(default=None, ge=1)
    """Units of the rows' boxes along each side of the image: 1 for fractions, 1000 for thousandths;
    None: pixels of the original image."""
    default_question: str | None = None
    """Question of rows without one, as of images with labels or captions only; None: such rows are
    bad, but for captions, which have a question of their own."""


class SourceSettings(RowSettings):
    """One of several sources of examples, with its own task."""

    source: Source
    """The source, as for ``data.train``."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name in metrics, and the start of the examples' ids; None: the task's name, or else the
    source's."""
    task: TaskSetting | None = None
    """Task of the examples, as for ``task``; None: the run's, with its options."""
    task_options: TaskOptions = Field(default_factory=dict)
    """Options of the task."""
    tasks: dict[str, TaskOptions] = Field(default_factory=dict)
    """Tasks that the rows themselves may name, in the column ``columns.task``, each with its
    options; empty: all rows have the same task."""
    benchmark: str | None = None
    """Of a held-out source: public benchmark whose prompt and official metric are used, as for
    ``evaluation.benchmark``. None: the task's."""
    weight: float | None = Field(default=None, gt=0)
    """Of a training source: its share of the prompts, relative to the other weights. None: 1 if
    another source has a weight, else by its size (``data.mixing_temperature``)."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of examples; None: ``data.train_limit`` or ``data.eval_limit``."""

    @property
    def label(self) -> str:
        if self.name is not None:
            return self.name
        if self.task is not None:
            return get_short_name(self.task)
        scheme, _, rest = self.source.partition(":")
        stem = Path(rest.partition(":")[0] if scheme in ("hf", "embedded") else self.source).stem
        return re.sub(r"[^A-Za-z0-9._-]", "-", stem) or "source"


def _tag_sources(value: Any) -> str:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    are_sources = is_list and all(
        isinstance(item, SourceSettings) or (isinstance(item, Mapping) and "source" in item)
        for item in value
    )
    return "sources" if are_sources else "source"


Sources = Annotated[
    Annotated[Source, Tag("source")] | Annotated[tuple[SourceSettings, ...], Tag("sources")],
    Discriminator(_tag_sources),
]
"""A source, or several with settings of their own."""


class DataSettings(RowSettings):
    """The examples, and how bad rows are treated.

    A source is a path to a file or folder (JSON Lines, JSON, CSV, TSV, Parquet, COCO, Pascal VOC,
    YOLO, image folders, WebDataset), a glob of files, ``hf:NAME[:SPLIT[:CONFIG]]`` (a dataset on
    the Hugging Face hub or in a local folder), or ``embedded:counting``, ``embedded:grounding`` or
    ``embedded:ocr`` (generated on the fly), or one of the small worlds with its level and dials,
    such as ``embedded:relations:hard,occlusion=0.3``. ``python``: rows that a program gives,
    ``train(settings, data=rows)``.
    """

    train: Annotated[Sources, SAME_ROWS]
    """Source of the training examples; or a list of sources, each a mapping with ``source`` and
    perhaps ``name``, ``task``, ``task_options``, ``tasks``, ``weight``, ``limit``, ``columns`` and
    ``image_root``: a mixture, whose sources may have different tasks."""
    eval: Annotated[Sources | None, FREE] = None
    """Source of the held-out examples, or a list of sources; a source without a task has that of
    the training source of its name, or else the run's. None: no evaluation, or ``eval_share``."""
    eval_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the training examples to hold out in place of ``eval``, chosen by their images:
    examples with an image in common stay together. None: none."""
    mixing_temperature: float | None = Field(default=None, gt=0)
    """Temperature T of a mixture without weights: a source of n examples has a share of the prompts
    in proportion to n to the power of 1/T. None: 1, by size; large values: equal shares."""
    eval_image_root: Annotated[Path | None, FREE] = None
    """Image folder of the held-out examples; None: ``image_root``."""
    train_limit: Annotated[int | None, SAME_ROWS] = Field(default=None, ge=1)
    """Maximum number of training examples of each source without a limit; None: all (embedded data:
    4096)."""
    eval_limit: Annotated[int | None, FREE] = Field(default=None, ge=1)
    """Maximum number of held-out examples of each source without a limit; None: all (embedded data:
    500)."""
    filter: Annotated[str, AfterValidator(lambda text: Filter(text) and text)] | None = None
    """Training examples to keep, by numbers about them: comparisons joined by ``and``, such as
    ``0.1 < pass_rate < 0.9``. None: all."""
    difficulty: Annotated[Path | None, SAME_ROWS] = None
    """File of ``vlm-grpo sample --difficulty`` with numbers for ``filter``; None: columns."""
    curriculum: Annotated[CurriculumSettings | None, FREE] = None
    """Prefer examples of medium difficulty, estimated during the run; None: take all in turn."""
    on_bad_row: Annotated[Literal["error", "skip"], SAME_ROWS] = "error"
    """Treatment of rows that cannot be used: report all of them and stop, or skip them and log
    their number."""
    max_image_pixels: Annotated[int, SAME_ROWS] = Field(
        default=PILLOW_WARNS_AT, ge=1, le=2 * PILLOW_WARNS_AT
    )
    """Maximum number of pixels of an image; Pillow itself refuses more than twice the default."""
    video: VideoSettings | None = None
    """Which frames of videos are taken; None: the defaults of these settings."""
    dataloader_num_workers: Annotated[int, FREE] = Field(default=0, ge=0)
    """Number of threads, per device, that prepare the images of training prompts one step ahead;
    0: one."""

    def get_sources(self, split: Split) -> tuple[SourceSettings, ...]:
        """Return the sources of a split, with the defaults that ``data`` sets for all of them."""
        given = self.train if split == "train" else self.eval
        if given is None:
            return ()
        entries = given if is_mixture(given) else (SourceSettings(source=given),)
        return tuple(self.complete(entry, split) for entry in entries)

    def complete(self, source: SourceSettings, split: Split) -> SourceSettings:
        """Return a source with the limit, columns, … that ``data`` sets for all."""
        limit = self.train_limit if split == "train" else self.eval_limit
        root = self.image_root if split == "train" else self.eval_image_root or self.image_root
        own = {
            "limit": source.limit or limit,
            "image_root": source.image_root or root,
            "columns": {**self.columns, **source.columns},
            "box_format": source.box_format or self.box_format or "xyxy",
            "box_scale": source.box_scale or self.box_scale,
            "default_question": source.default_question or self.default_question,
        }
        return source.model_copy(update=own)

    def describe(self, split: Split) -> str:
        return ", ".join(source.source for source in self.get_sources(split))

    @property
    def has_held_out(self) -> bool:
        return self.eval is not None or self.eval_share is not None

    @property
    def is_embedded(self) -> bool:
        return not self._reads_files("train") and not self.evaluates_files

    @property
    def evaluates_files(self) -> bool:
        return self._reads_files("eval")

    def _reads_files(self, split: Split) -> bool:
        return any(not s.source.startswith("embedded:") for s in self.get_sources(split))

    @property
    def repeated_labels(self) -> list[str]:
        found = []
        for split in ("train", "eval"):
            labels = [source.label for source in self._get_mixture(split)]
            repeated = sorted({label for label in labels if labels.count(label) > 1})
            found += [f"{split} has several sources {label}" for label in repeated]
        return found

    @property
    def unused_limits(self) -> list[str]:
        limits: dict[Split, int | None] = {"train": self.train_limit, "eval": self.eval_limit}
        sources = {s: self._get_mixture(s) for s, limit in limits.items() if limit is not None}
        return [split for split, own in sources.items() if own and all(s.limit for s in own)]

    @property
    def weighs_held_out(self) -> bool:
        return any(source.weight is not None for source in self._get_mixture("eval"))

    @property
    def trains_on_benchmark(self) -> bool:
        return any(source.benchmark is not None for source in self._get_mixture("train"))

    @property
    def is_mixed_by_size(self) -> bool:
        sources = self._get_mixture("train")
        return len(sources) > 1 and all(source.weight is None for source in sources)

    def _get_mixture(self, split: Split) -> tuple[SourceSettings, ...]:
        given = self.train if split == "train" else self.eval
        return given if is_mixture(given) else ()


def is_mixture(given: object) -> TypeGuard[tuple[SourceSettings, ...]]:
    return isinstance(given, tuple)
