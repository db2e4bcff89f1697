"""Coordinate frames: between the numbers that a model writes and pixels of the original image.

A box is xyxy, in pixels of the original image, everywhere in the toolkit. Each model family
writes boxes in a grammar and a frame of its own; the family declares which, and nothing here
guesses it from the numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Box = tuple[float, float, float, float]
"""x1, y1, x2, y2: left, top, right and bottom edge."""
Size = tuple[int, int]
"""Width and height in pixels."""
Cells = tuple[int, int, int, int]
"""A box in whole units of a frame, as it is written."""


def _json_objects(boxes: Sequence[Cells], labels: Sequence[str] | None) -> str:
    if labels is None:
        objects: list[dict] = [{"bbox_2d": list(box)} for box in boxes]
    else:
        pairs = zip(boxes, labels, strict=True)
        objects = [{"bbox_2d": list(box), "label": label} for box, label in pairs]
    return json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False)


def _box_tokens(boxes: Sequence[Cells], labels: Sequence[str] | None) -> str:
    names = [f"<|object_ref_start|>{label}<|object_ref_end|>" for label in labels or ()]
    return "".join(
        f"{name}<|box_start|>({x1},{y1}),({x2},{y2})<|box_end|>"
        for name, (x1, y1, x2, y2) in zip(names or [""] * len(boxes), boxes, strict=True)
    )


def _box_tags(boxes: Sequence[Cells], labels: Sequence[str] | None) -> str:
    if labels is None:
        inner = ",".join(f"[{x1},{y1},{x2},{y2}]" for x1, y1, x2, y2 in boxes)
        return f"<box>[{inner}]</box>"
    return "".join(
        f"<ref>{label}</ref><box>[[{x1},{y1},{x2},{y2}]]</box>"
        for label, (x1, y1, x2, y2) in zip(labels, boxes, strict=True)
    )


def _loc_tokens(boxes: Sequence[Cells], labels: Sequence[str] | None) -> str:
    names = [f" {label}" for label in labels or ()] or [""] * len(boxes)
    return " ; ".join(
        f"<loc{y1:04d}><loc{x1:04d}><loc{y2:04d}><loc{x2:04d}>{name}"
        for name, (x1, y1, x2, y2) in zip(names, boxes, strict=True)
    )


def gold_boxes(answer: Any) -> tuple[Box, ...]:
    """The boxes of a gold answer ``{"boxes": [[x1, y1, x2, y2], …], …}``.

    Raises:
        ValueError: the answer has another form, or a box is no four finite numbers with x1 < x2
            and y1 < y2; the message names what is wrong.
    """
    rows = answer.get("boxes") if isinstance(answer, Mapping) else None
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ValueError(
            f'the answer {answer!r} has no list of boxes; write {{"boxes": [[x1, y1, x2, y2]]}}'
        )
    boxes = []
    for row in rows:
        try:
            x1, y1, x2, y2 = map(float, row)
        except (TypeError, ValueError) as error:
            raise ValueError(f"box {row!r} must be four numbers x1, y1, x2, y2") from error
        if not (math.isfinite(x1 + y1 + x2 + y2) and x1 < x2 and y1 < y2):
            raise ValueError(
                f"box {row!r} must be finite with x1 < x2 and y1 < y2 (corners, not a width and "
                "a height), in pixels of the original image"
            )
        boxes.append((x1, y1, x2, y2))
    return tuple(boxes)


def _whole(*numbers: float) -> bool:
    return all(number == round(number) for number in numbers)


@dataclass(frozen=True)
class CoordinateFrame:
    """How a model family writes boxes.

    Attributes:
        name: the key in ``FRAMES``.
        units: words that tell the model what its numbers mean; ``{width}`` and ``{height}``
            stand for the original's size in pixels.
        form: one box as the prompt shows it.
        span: what the frame's axes measure: pixels of the original, pixels of the image that
            the model saw, or a fixed number of units from edge to edge.
        last: the largest number that the grammar can write; None where there is no bound.
        grammar: writes boxes in whole units, labelled or not.
    """

    name: str
    units: str = "in pixels"
    form: str = '{"bbox_2d": [x1, y1, x2, y2]}'
    span: Literal["original", "seen"] | int = "original"
    last: int | None = None
    grammar: Callable[[Sequence[Cells], Sequence[str] | None], str] = _json_objects

    def describe(self, size: Size, form: str | None = None) -> str:
        """How to write one box of an image of this original size, in words for the prompt.

        ``form`` stands in for a box where something else is asked for in the same units.

        >>> PERMILLE.describe((640, 480))
        '{"bbox_2d": [x1, y1, x2, y2]} scaled to 0-1000'
        """
        return f"{form or self.form} {self.units.format(width=size[0], height=size[1])}"

    def to_pixels(self, box: Box, size: Size, resized_size: Size) -> Box:
        """A box in this frame's units → original pixels.

        Args:
            box: xyxy in units of the frame.
            size: width and height of the original, in pixels.
            seen: width and height of the image that the model saw, in pixels.
        """
        width, height = self._extent(size, resized_size)
        x, y = size[0] / width, size[1] / height
        return (box[0] * x, box[1] * y, box[2] * x, box[3] * y)

    def from_pixels(self, box: Box, size: Size, resized_size: Size) -> Box:
        """The inverse of ``to_pixels``: original pixels → this frame's units, not rounded."""
        width, height = self._extent(size, resized_size)
        x, y = width / size[0], height / size[1]
        return (box[0] * x, box[1] * y, box[2] * x, box[3] * y)

    def write(self, box: Box, size: Size, resized_size: Size) -> str:
        """One box in original pixels, as the family writes it.

        >>> PERMILLE.write((64, 48, 320, 480), (640, 480), (644, 476))
        '{"bbox_2d": [100, 100, 500, 1000]}'
        """
        return self.write_all([box], size, resized_size)

    def write_all(
        self,
        boxes: Sequence[Box],
        size: Size,
        resized_size: Size,
        labels: Sequence[str] | None = None,
    ) -> str:
        """Any number of boxes in original pixels, as the family writes them; none is ``[]``.

        Numbers are rounded to whole units. A box thinner than a unit keeps one unit, because a
        box without area is no box; with PaliGemma the far edge is unit 1023, the last token.
        """
        if not boxes:
            return "[]"
        cells = [self._cells(self.from_pixels(box, size, resized_size)) for box in boxes]
        return self.grammar(cells, labels)

    def least_iou(self, box: Box, size: Size, resized_size: Size) -> float:
        """The least IoU that is left between a box and itself written and read again.

        Each edge moves by half a unit at most, and the worst is all four moving inwards.
        """
        x1, y1, x2, y2 = self.from_pixels(box, size, resized_size)
        lost = 1.0 if self.last is None else 2.0  # the last token may be a whole unit away
        left = max(0.0, 1.0 - lost / (x2 - x1)) * max(0.0, 1.0 - lost / (y2 - y1))
        return 1.0 if _whole(x1, y1, x2, y2) and self.last is None else left

    def _cells(self, box: Box) -> Cells:
        x1, x2 = self._edges(box[0], box[2])
        y1, y2 = self._edges(box[1], box[3])
        return (x1, y1, x2, y2)

    def _edges(self, low: float, high: float) -> tuple[int, int]:
        last = math.inf if self.last is None else self.last
        first, second = round(low), round(high)
        if self.last is not None:
            first, second = max(0, first), min(second, self.last)
        if second <= first:
            first = int(min(math.floor(low), last - 1))
            second = first + 1
        return first, second

    def _extent(self, size: Size, resized_size: Size) -> tuple[float, float]:
        if self.span == "original":
            return size
        if self.span == "seen":
            return resized_size
        return (self.span, self.span)


ORIGINAL = CoordinateFrame("original", "in pixels of the {width}x{height} image")
"""Pixels of the original image; the prompt states its size, which the model cannot see."""
RESIZED = CoordinateFrame("resized", span="seen")
"""Pixels of the image that the model saw (Qwen2.5-VL)."""
PERMILLE = CoordinateFrame("permille", "scaled to 0-1000", span=1000)
"""Thousandths of the image's sides, in JSON (Qwen3-VL)."""
QWEN2_VL = CoordinateFrame(
    "qwen2_vl",
    "scaled to 0-1000",
    form="<|box_start|>(x1,y1),(x2,y2)<|box_end|>",
    span=1000,
    grammar=_box_tokens,
)
INTERNVL = CoordinateFrame(
    "internvl",
    "scaled to 0-1000",
    form="<box>[[x1,y1,x2,y2]]</box>",
    span=1000,
    grammar=_box_tags,
)
PALIGEMMA = CoordinateFrame(
    "paligemma",
    "scaled to 0-1024",
    form="<locYYYY><locXXXX><locYYYY><locXXXX>",
    span=1024,
    last=1023,
    grammar=_loc_tokens,
)

FRAMES = {
    frame.name: frame for frame in (ORIGINAL, RESIZED, PERMILLE, QWEN2_VL, INTERNVL, PALIGEMMA)
}
"""Every frame by its name."""
