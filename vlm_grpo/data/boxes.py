"""Boxes of examples: in answers and in the column ``evidence``, their forms, and their images."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
from PIL import Image, ImageStat

from vlm_grpo.config.data import BoxFormat, SourceSettings
from vlm_grpo.media.images import encode_png
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import Box, BoxError, gold_boxes
from vlm_grpo.types import Example, ImageRef

_TOLERANCE = 1.0
"""Pixels by which a box may extend beyond its image. Annotations are rounded, and no official
evaluation drops such boxes."""
TRIED_ROWS = 100  # rows on which other forms of boxes are tried
_LEAST_ROWS, _LEAST_REACH = 20, 0.67
"""Of as many rows, some box ends in the last third of its image's width or height."""


def list_boxes(example: Example) -> tuple[Box, ...]:
    """Return the boxes of an example's answer in pixels; none of an answer of another form."""
    try:
        return gold_boxes(example.answer) if example.images else ()
    except ValueError:  # of a user's task, which has accepted it
        return ()


def list_evidence(example: Example) -> tuple[Box, ...]:
    """Return the boxes of the column ``evidence`` in pixels, the parts of the image that an answer
    needs; none if it holds something else. ``ValueError``: one is no box."""
    found = example.meta.get("evidence") if example.images else None
    try:
        return gold_boxes({"boxes": found}) if holds_boxes(found) else ()
    except ValueError as error:
        raise ValueError(f"evidence: {error}") from error


def read_boxes(answer: Any) -> tuple[Box, ...]:
    """Return a parsed answer that is boxes in pixels; () if it is something else."""
    with suppress(ValueError):
        return gold_boxes({"boxes": answer}) if holds_boxes(answer) else ()
    return ()


def holds_boxes(value: Any) -> bool:
    """Return whether a column has boxes; some have times, or texts."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(isinstance(item, list | tuple) for item in value)


def crop_to_boxes(image: ImageRef, boxes: Sequence[Box], margin: float) -> ImageRef:
    """Return the part of an image around all boxes, each extended by a share of its sides."""
    left, top, right, bottom = zip(*_extend(image, boxes, margin), strict=True)
    around = min(left), min(top), max(right), max(bottom)
    return _make_image(f"{image.name}, cropped", image.load().crop(around))


def mask_beyond_boxes(image: ImageRef, boxes: Sequence[Box], margin: float) -> ImageRef:
    """Return the image, black beyond the boxes, each extended by a share of its sides."""
    picture, shown = image.load(), Image.new("RGB", image.size)
    for part in _extend(image, boxes, margin):
        shown.paste(picture.crop(part), part)
    return _make_image(f"{image.name}, masked", shown)


def hide_boxes(image: ImageRef, boxes: Sequence[Box]) -> ImageRef:
    """Return the image with its mean color in place of what the boxes show."""
    shown = image.load().copy()
    mean = tuple(map(round, ImageStat.Stat(shown).mean))
    for part in _extend(image, boxes, 0.0):
        shown.paste(mean, part)
    return _make_image(f"{image.name}, without its boxes", shown)


def replace_image(example: Example, old: ImageRef, new: ImageRef) -> Example:
    """Return the example with another image in the place of one of its own."""
    return replace(example, images=tuple(new if i is old else i for i in example.images))


def _extend(
    image: ImageRef, boxes: Sequence[Box], margin: float
) -> list[tuple[int, int, int, int]]:
    edges, size = np.array(boxes), np.array(image.size)
    room = margin * (edges[:, 2:] - edges[:, :2])
    low = np.floor(edges[:, :2] - room).clip(0, size - 1)
    high = np.ceil(edges[:, 2:] + room).clip(low + 1, size)
    return [tuple(row) for row in np.hstack([low, high]).astype(int).tolist()]


def _make_image(name: str, shown: Image.Image) -> ImageRef:
    return ImageRef(name, shown.size, shown.size, data=encode_png(shown, compress_level=1))


def check_boxes(example: Example, task: Task) -> None:
    """Raise a ``BoxError`` if a gold box is not in pixels of its image."""
    boxes, evidence = list_boxes(example), list_evidence(example)
    if not boxes and not evidence:
        return
    width, height = size = task.target_image(example).size
    for box in (*boxes, *evidence):
        check_inside(box, size)
    # Large datasets have single boxes that are too thin; official evaluations keep them. Edges in
    # decimals are not exact: 2.3 - 1.3 is a little less than 1.
    if boxes and all(min(x2 - x1, y2 - y1) < 1 - 1e-6 for x1, y1, x2, y2 in boxes):
        raise BoxError(
            f"box {list(boxes[0])} is smaller than a pixel of its image of {width}x{height}"
        )


def changes_boxes(source: SourceSettings) -> bool:
    return source.box_format not in (None, "xyxy") or source.box_scale is not None


def convert_boxes(answer: Any, source: SourceSettings, size: tuple[int, int]) -> Any:
    """Return an answer with its boxes as edges in pixels of an image of ``size``."""
    boxes = answer.get("boxes") if isinstance(answer, Mapping) else None
    if not isinstance(boxes, list | tuple):
        return answer
    if others := {"points", "masks"} & answer.keys():
        raise ValueError(
            f"its answer has {' and '.join(sorted(others))}, which box_format and box_scale do not "
            "convert: give it in pixels of the image"
        )
    scale = source.box_scale
    units = (1, 1) if scale is None else (size[0] / scale, size[1] / scale)
    converted = []
    for box in boxes:
        if not isinstance(box, list | tuple) or len(box) != 4 or not all(map(_is_number, box)):
            return answer  # the task says what is wrong
        a, b, c, d = box
        edges = {
            "xywh": (a, b, a + c, b + d),
            "cxcywh": (a - c / 2, b - d / 2, a + c / 2, b + d / 2),
            "yxyx": (b, a, d, c),
        }.get(source.box_format or "", (a, b, c, d))
        converted.append([round(edge * units[i % 2], 3) for i, edge in enumerate(edges)])
    return {**answer, "boxes": converted}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_inside(box: Sequence[float], size: tuple[int, int]) -> None:
    """Raise a ``BoxError`` if a box reaches beyond its image."""
    (x1, y1, x2, y2), (width, height) = box, size
    if min(x1, y1) < -_TOLERANCE or x2 > width + _TOLERANCE or y2 > height + _TOLERANCE:
        raise BoxError(f"box {list(box)} (x1, y1, x2, y2) is outside its image of {width}x{height}")


def parse_boxes(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(item, Mapping) and "bbox_2d" in item for item in value):
        boxes = {"boxes": [item["bbox_2d"] for item in value]}
        if all("label" in item for item in value):
            return {**boxes, "labels": [item["label"] for item in value]}
        return boxes
    if len(value) == 4 and all(map(_is_number, value)):
        return {"boxes": [list(value)]}
    if all(isinstance(item, (list, tuple)) and len(item) == 4 for item in value):
        return {"boxes": [list(item) for item in value]}
    return None


class BoxExtent:
    """How far the boxes of a source reach into their images, as shares of the sides."""

    def __init__(self) -> None:
        self._count, self._reach = 0, [0.0, 0.0]

    def add(self, example: Example, task: Task) -> None:
        if boxes := list_boxes(example):
            self._count += 1
            for axis, side in enumerate(task.target_image(example).size):
                reach = max(box[2 + axis] for box in boxes) / side
                self._reach[axis] = max(self._reach[axis], reach)

    @property
    def is_short(self) -> bool:
        """Whether they seem to be those of a smaller image, or thousandths of a larger one."""
        return self._count >= _LEAST_ROWS and max(self._reach) < _LEAST_REACH

    def __str__(self) -> str:
        across, down = self._reach
        return (
            f"no box of {self._count} rows reaches beyond {across:.0%} of its image's width or "
            f"{down:.0%} of its height: boxes must be pixels of the original image; for others set "
            "data.box_scale"
        )


def suggest_settings(
    rows: Sequence[tuple[Any, Task]],
    source: SourceSettings,
    read: Callable[..., Example],
    is_mixed: bool,
) -> str:
    """Return the settings with which none of the rows has a bad box, for the end of a message.

    ``read(row, source, task=…)`` converts a row, as ``to_example`` does.
    """
    found = []
    forms = dict.fromkeys((source.box_format, *get_args(BoxFormat)))
    scales = dict.fromkeys((source.box_scale, None, 1, 1000))
    for form, scale in product(forms, scales):
        other = source.model_copy(update={"box_format": form, "box_scale": scale})
        extent, good, bad = BoxExtent(), 0, 0
        for row, task in rows:
            try:
                extent.add(read(row, other, task=task), task)
                good += 1
            except BoxError:
                bad += 1
            except ValueError:  # a row that is bad in every form
                continue
        changes = [f"box_format={form}"] * (form != source.box_format)
        changes += [f"box_scale={scale or 'null'}"] * (scale != source.box_scale)
        if not changes and bad < good / 4 and not extent.is_short:  # they are only bad boxes
            return ""
        if changes and good and not bad and not extent.is_short:
            found.append(" ".join(change if is_mixed else f"data.{change}" for change in changes))
    if found:
        look = ": look at them with check --preview" if len(found) > 1 else ""
        by = " or by ".join(found)
        return f"; the first {TRIED_ROWS} rows are read without such a box by {by}{look}"
    return (
        "; boxes must be pixels of the original image, and no data.box_format and data.box_scale "
        "of 1 or 1000 reads all of the first ones: are they of another size of the images?"
    )
