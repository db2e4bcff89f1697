"""The parts of an image that an answer needs, as boxes in the row's column ``evidence``."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image, ImageStat

from vlm_grpo.media.images import encode_png
from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.types import Example, ImageRef


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
