"""Marks on a copy of an image: what a model answered, for people to see."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont

Box = tuple[float, float, float, float]

GOLD_COLOR = "#ffb000"
PREDICTED_COLOR = "#dc267f"
"""Colours of the gold and of the predicted answer; people who are colour-blind tell them apart."""
_CAPTION_LINES = 8


def draw_boxes(
    image: Image.Image, boxes: Sequence[Box], color: str, labels: Sequence[str] | None = None
) -> Image.Image:
    """A copy of the image with the boxes outlined, their labels inside at the top left.

    Args:
        image: the original image.
        boxes: xyxy in the image's pixels; parts outside it are not drawn.
        color: a colour name or ``#rrggbb``.
        labels: one text for each box, or None.
    """
    drawn = image.copy()
    pen = ImageDraw.Draw(drawn)
    width = _pen_width(image)
    for number, (x1, y1, x2, y2) in enumerate(boxes):
        # The second edge of a box is the first pixel outside it; Pillow draws both ends.
        near = [max(x1, -width), max(y1, -width)]
        far = [min(x2, image.width + width) - 1, min(y2, image.height + width) - 1]
        if near[0] <= far[0] and near[1] <= far[1]:
            pen.rectangle([*near, *far], outline=color, width=width)
            if labels is not None:
                pen.text((near[0] + width + 1, near[1] + width), labels[number], fill=color)
    return drawn


def draw_points(
    image: Image.Image, points: Sequence[tuple[float, float]], color: str
) -> Image.Image:
    """A copy of the image with a dot at each point, (x, y) in the image's pixels."""
    drawn = image.copy()
    pen = ImageDraw.Draw(drawn)
    for point in points:
        pen.circle(point, 2 * _pen_width(image), fill=color)
    return drawn


def _pen_width(image: Image.Image) -> int:
    return max(1, max(image.size) // 200)


def captioned(image: Image.Image, text: str, color: str) -> Image.Image:
    """A copy of the image with the text on a band below it, broken into lines and cut at eight.

    The font that comes with Pillow has Latin letters; others show as empty boxes.
    """
    size = max(12, min(32, image.width // 24))
    font = ImageFont.load_default(size)
    width = max(image.width, 12 * size)
    columns = max(8, int((width - size) / (0.55 * size)))
    lines = [part for line in text.splitlines() for part in wrap(line, columns)] or ["(nothing)"]
    if len(lines) > _CAPTION_LINES:
        lines = [*lines[: _CAPTION_LINES - 1], "…"]
    step = size * 5 // 4
    height = image.height + step * len(lines) + size
    drawn = Image.new("RGB", (width, height), "white")
    drawn.paste(image, ((width - image.width) // 2, 0))
    pen = ImageDraw.Draw(drawn)
    for number, line in enumerate(lines):
        pen.text((size // 2, image.height + size // 2 + number * step), line, fill=color, font=font)
    return drawn
