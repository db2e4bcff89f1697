"""Coordinate frames: conversion between boxes as a model writes them and original pixels.

Throughout the toolkit a box is xyxy in pixels of the original image. Each model family declares
the grammar and the coordinate frame in which it writes boxes; they are never guessed from numbers.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Box = tuple[float, float, float, float]  # x1, y1, x2, y2: left, top, right and bottom edges
Size = tuple[int, int]  # width and height in pixels
RoundedBox = tuple[int, int, int, int] | Box  # as it is written: integers, but for FRACTION
_LARGEST = 1e6  # absolute value of a coordinate that a model passes to a tool


def _write_json(
    boxes: Sequence[RoundedBox], labels: Sequence[str] | None, key: str = "bbox_2d"
) -> str:
    objects: list[dict] = [{key: list(box)} for box in boxes]
    if labels is not None:
        pairs = zip(objects, labels, strict=True)
        objects = [{**found, "label": label} for found, label in pairs]
    return json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False)


def _write_box_tokens(boxes: Sequence[RoundedBox], labels: Sequence[str] | None) -> str:
    names = [f"<|object_ref_start|>{label}<|object_ref_end|>" for label in labels or ()]
    return "".join(
        f"{name}<|box_start|>({x1},{y1}),({x2},{y2})<|box_end|>"
        for name, (x1, y1, x2, y2) in zip(names or [""] * len(boxes), boxes, strict=True)
    )


def _write_box_tags(boxes: Sequence[RoundedBox], labels: Sequence[str] | None) -> str:
    if labels is None:
        inner = ",".join(f"[{x1},{y1},{x2},{y2}]" for x1, y1, x2, y2 in boxes)
        return f"<box>[{inner}]</box>"
    return "".join(
        f"<ref>{label}</ref><box>[[{x1},{y1},{x2},{y2}]]</box>"
        for label, (x1, y1, x2, y2) in zip(labels, boxes, strict=True)
    )


def _write_loc_tokens(boxes: Sequence[RoundedBox], labels: Sequence[str] | None) -> str:
    names = [f" {label}" for label in labels or ()] or [""] * len(boxes)
    return " ; ".join(
        f"<loc{y1:04d}><loc{x1:04d}><loc{y2:04d}><loc{x2:04d}>{name}"
        for name, (x1, y1, x2, y2) in zip(names, boxes, strict=True)
    )


def _write_boxed(boxes: Sequence[RoundedBox], labels: Sequence[str] | None) -> str:
    return f"<|begin_of_box|>{_write_json(boxes, labels)}<|end_of_box|>"


def _write_y_first(boxes: Sequence[RoundedBox], labels: Sequence[str] | None) -> str:
    return _write_json([(y1, x1, y2, x2) for x1, y1, x2, y2 in boxes], labels, "box_2d")


class BoxError(ValueError):
    """Four numbers are no box of their image, perhaps because they have another form."""


def gold_boxes(answer: Any) -> tuple[Box, ...]:
    """Return the boxes of a gold answer ``{"boxes": [[x1, y1, x2, y2], …], …}`` in original pixels.

    ``ValueError`` names the problem of an answer of another form, or of a box that is not four
    finite numbers with x1 < x2 and y1 < y2.
    """
    rows = answer.get("boxes") if isinstance(answer, Mapping) else None
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ValueError(
            f'the answer {answer!r} has no list of boxes; write {{"boxes": [[x1, y1, x2, y2]]}}'
        )
    boxes = []
    for row in rows:
        try:
            if any(isinstance(value, bool) for value in row):  # which float() reads
                raise TypeError("no numbers")
            x1, y1, x2, y2 = map(float, row)
        except (TypeError, ValueError) as error:
            raise ValueError(f"box {row!r} must be four numbers x1, y1, x2, y2") from error
        if not (math.isfinite(x1 + y1 + x2 + y2) and x1 < x2 and y1 < y2):
            raise BoxError(
                f"box {row!r} must be finite with x1 < x2 and y1 < y2 (corners, not a width and "
                "a height), in pixels of the original image"
            )
        boxes.append((x1, y1, x2, y2))
    return tuple(boxes)


@dataclass(frozen=True)
class CoordinateFrame:
    """The units and the grammar in which a model family writes boxes.

    Sizes are (width, height): ``size`` of the original image, in pixels; ``resized_size`` after
    the family's resize.
    """

    name: str  #: the key in ``FRAMES``
    #: description of the units in the prompt; ``{width}`` and ``{height}`` are replaced by the size
    #: of the original image in pixels
    units: str = "in pixels"
    form: str = '{"bbox_2d": [x1, y1, x2, y2]}'  #: the example of a box in the prompt
    #: units along each side of the image: the pixels of the original image, the pixels of the
    #: resized image, or a fixed number
    span: Literal["original", "resized"] | int = "original"
    max_coordinate: int | None = None  #: largest number that the grammar can write; None: no limit
    decimals: int = 0  #: number of decimals of written coordinates
    y_first: bool = False  #: whether JSON has y before x, under the keys ``box_2d`` and ``point``
    #: a function that writes rounded boxes, with or without labels
    grammar: Callable[[Sequence[RoundedBox], Sequence[str] | None], str] = _write_json

    def describe(self, size: Size) -> str:
        """Return the prompt's description of a box in this frame.

        >>> PERMILLE.describe((640, 480))
        '{"bbox_2d": [x1, y1, x2, y2]} scaled to 0-1000'
        """
        return f"{self.form} {self.describe_units(size)}"

    def describe_point(self, size: Size) -> str:
        """Return the prompt's description of a point, which is JSON in every frame.

        >>> GEMMA4.describe_point((640, 480))
        '{"point": [y, x]} scaled to 0-1000'
        """
        form = '{"point": [y, x]}' if self.y_first else '{"point_2d": [x, y]}'
        return f"{form} {self.describe_units(size)}"

    def describe_units(self, size: Size) -> str:
        """Return the description of the units in ``describe``, whose numbers answers may repeat."""
        return self.units.format(width=size[0], height=size[1])

    def to_pixels(self, box: Box, size: Size, resized_size: Size) -> Box:
        """Convert a box (xyxy) from this frame's units to original pixels."""
        width, height = self._get_span(size, resized_size)
        x, y = size[0] / width, size[1] / height
        return (box[0] * x, box[1] * y, box[2] * x, box[3] * y)

    def find_place(
        self, numbers: Any, count: int, size: Size, resized_size: Size
    ) -> tuple[float, ...]:
        """Return the box (4 numbers) or point (2) that a model wrote, in original pixels; a box is
        clipped to the image. ``BoxError`` says what it must be, or that it is outside."""
        is_list = isinstance(numbers, list | tuple) and len(numbers) == count
        if not is_list or not all(type(number) in (int, float) for number in numbers):
            raise BoxError(f"must be a list of {count} numbers")
        if not all(abs(number) <= _LARGEST for number in numbers):
            raise BoxError("has a number that is too large")
        places = [float(number) for number in numbers]
        if self.y_first:
            places = [n for y, x in zip(places[::2], places[1::2], strict=True) for n in (x, y)]
        corners = (*places, *places)[:4]
        x1, y1, x2, y2 = self.to_pixels(corners, size, resized_size)  # type: ignore[arg-type]
        if count == 2:
            if not (0 <= x1 <= size[0] and 0 <= y1 <= size[1]):
                raise BoxError("is outside the image")
            return (x1, y1)
        box = max(x1, 0.0), max(y1, 0.0), min(x2, float(size[0])), min(y2, float(size[1]))
        if not (box[0] < box[2] and box[1] < box[3]):
            raise BoxError("has no area inside the image: write x1 < x2 and y1 < y2")
        return box

    def from_pixels(self, box: Box, size: Size, resized_size: Size) -> Box:
        """Convert a box from original pixels to this frame's units, without rounding."""
        width, height = self._get_span(size, resized_size)
        x, y = width / size[0], height / size[1]
        return (box[0] * x, box[1] * y, box[2] * x, box[3] * y)

    def write_all(
        self,
        boxes: Sequence[Box],
        size: Size,
        resized_size: Size,
        labels: Sequence[str] | None = None,
    ) -> str:
        """Write boxes, given in original pixels, in the family's grammar; no boxes are ``[]``.

        Coordinates are rounded to ``decimals``. A box thinner than one unit gets one, because a
        box without area is invalid. PaliGemma's largest coordinate is 1023, its last token.

        >>> PERMILLE.write_all([(64, 48, 320, 480)], (640, 480), (644, 476))
        '{"bbox_2d": [100, 100, 500, 1000]}'
        """
        if not boxes:
            return "[]"
        rounded = [self._round(self.from_pixels(box, size, resized_size)) for box in boxes]
        return self.grammar(rounded, labels)

    def write_points(
        self, points: Sequence[tuple[float, float]], size: Size, resized_size: Size
    ) -> str:
        """Write points, given as (x, y) in original pixels; one point is not in a list."""
        digits = self.decimals or None  # None rounds to an integer
        objects = []
        for x, y in points:
            x, y, _, _ = self.from_pixels((x, y, x, y), size, resized_size)
            x, y = round(x, digits), round(y, digits)
            objects.append({"point": [y, x]} if self.y_first else {"point_2d": [x, y]})
        return json.dumps(objects[0] if len(objects) == 1 else objects)

    def least_iou(self, box: Box, size: Size, resized_size: Size) -> float:
        """Return a lower bound on the IoU between a box and the same box after writing and parsing.

        Each edge moves by at most half a unit; the worst case is that all four move inwards.
        """
        edges = [edge * 10**self.decimals for edge in self.from_pixels(box, size, resized_size)]
        if self.max_coordinate is None and all(edge == round(edge) for edge in edges):
            return 1.0
        x1, y1, x2, y2 = edges
        loss = 1.0 if self.max_coordinate is None else 2.0  # the last token may be one unit away
        return max(0.0, 1.0 - loss / (x2 - x1)) * max(0.0, 1.0 - loss / (y2 - y1))

    def _round(self, box: Box) -> RoundedBox:
        scale = 10**self.decimals
        x1, x2 = self._round_edges(box[0] * scale, box[2] * scale)
        y1, y2 = self._round_edges(box[1] * scale, box[3] * scale)
        return (x1, y1, x2, y2) if scale == 1 else (x1 / scale, y1 / scale, x2 / scale, y2 / scale)

    def _round_edges(self, low: float, high: float) -> tuple[int, int]:
        limit = math.inf if self.max_coordinate is None else self.max_coordinate
        first, second = round(low), round(high)
        if self.max_coordinate is not None:
            first, second = max(0, first), min(second, self.max_coordinate)
        if second <= first:
            first = int(min(math.floor(low), limit - 1))
            second = first + 1
        return first, second

    def _get_span(self, size: Size, resized_size: Size) -> tuple[float, float]:
        if self.span == "original":
            return size
        if self.span == "resized":
            return resized_size
        return (self.span, self.span)


ORIGINAL = CoordinateFrame("original", "in pixels of the {width}x{height} image")
"""Pixels of the original image; the prompt gives its size, which the model cannot know."""
RESIZED = CoordinateFrame("resized", span="resized")  #: Pixels of the resized image (Qwen2.5-VL)
PERMILLE = CoordinateFrame("permille", "scaled to 0-1000", span=1000)
"""Thousandths of the image's sides, in JSON (Qwen3-VL)."""
QWEN2_VL = CoordinateFrame(
    "qwen2_vl",
    "scaled to 0-1000",
    form="<|box_start|>(x1,y1),(x2,y2)<|box_end|>",
    span=1000,
    grammar=_write_box_tokens,
)
INTERNVL = CoordinateFrame(
    "internvl",
    "scaled to 0-1000",
    form="<box>[[x1,y1,x2,y2]]</box>",
    span=1000,
    grammar=_write_box_tags,
)
PALIGEMMA = CoordinateFrame(
    "paligemma",
    "scaled to 0-1024",
    form="<locYYYY><locXXXX><locYYYY><locXXXX>",
    span=1024,
    max_coordinate=1023,
    grammar=_write_loc_tokens,
)
GLM = CoordinateFrame("glm", "scaled to 0-1000", span=1000, grammar=_write_boxed)
"""Thousandths in JSON between GLM-V's two markers of a final answer."""
GEMMA4 = CoordinateFrame(
    "gemma4",
    "scaled to 0-1000",
    form='{"box_2d": [y1, x1, y2, x2]}',
    span=1000,
    y_first=True,
    grammar=_write_y_first,
)

FRACTION = CoordinateFrame("fraction", "scaled to 0-1", span=1, decimals=3)
"""Fractions of the image's sides (LLaVA, LFM2-VL, and lmms-eval's prompt for RefCOCO)."""
MOLMO = CoordinateFrame("molmo", "scaled to 0-100", span=100, decimals=1)
"""Per cent of the image's sides, which Molmo writes as ``<point x="61.5" y="40.6">``."""

FRAMES = {
    frame.name: frame
    for frame in (
        *(ORIGINAL, RESIZED, PERMILLE, FRACTION),
        *(QWEN2_VL, INTERNVL, GLM, PALIGEMMA, GEMMA4, MOLMO),
    )
}
"""All frames by name."""
