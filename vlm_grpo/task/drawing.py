"""Drawing answers on a copy of an image."""

from collections.abc import Sequence
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont

from vlm_grpo.task.coordinates import Box

GOLD_COLOR = "#ffb000"
PREDICTED_COLOR = "#dc267f"
"""Colors of gold and predicted answers, distinguishable with color blindness."""
_MAX_CAPTION_LINES = 8


def draw_boxes(
    image: Image.Image, boxes: Sequence[Box], color: str, labels: Sequence[str] | None = None
) -> Image.Image:
    """Return a copy of the image with outlined boxes and their labels at the top left inside.

    Boxes are xyxy in pixels of the image; parts outside of it are not drawn.
    """
    drawn = image.copy()
    pen = ImageDraw.Draw(drawn)
    width = _get_pen_width(image)
    for number, (x1, y1, x2, y2) in enumerate(boxes):
        # x2 and y2 are the first pixels outside the box, while Pillow draws both ends.
        start = [max(x1, -width), max(y1, -width)]
        end = [min(x2, image.width + width) - 1, min(y2, image.height + width) - 1]
        if start[0] <= end[0] and start[1] <= end[1]:
            pen.rectangle([*start, *end], outline=color, width=width)
            if labels is not None:
                pen.text((start[0] + width + 1, start[1] + width), labels[number], fill=color)
    return drawn


def draw_points(
    image: Image.Image, points: Sequence[tuple[float, float]], color: str
) -> Image.Image:
    """Return a copy of the image with a dot at each point (x, y), in pixels of the image."""
    drawn = image.copy()
    pen = ImageDraw.Draw(drawn)
    for point in points:
        pen.circle(point, 2 * _get_pen_width(image), fill=color)
    return drawn


def _get_pen_width(image: Image.Image) -> int:
    return max(1, max(image.size) // 200)


def draw_caption(image: Image.Image, text: str, color: str) -> Image.Image:
    """Return a copy of the image with the text, of at most eight lines, on a band below it.

    The font, Pillow's default, has only Latin letters; others appear as empty boxes.
    """
    size = max(12, min(32, image.width // 24))
    font = ImageFont.load_default(size)
    width = max(image.width, 12 * size)
    columns = max(8, int((width - size) / (0.55 * size)))
    lines = [part for line in text.splitlines() for part in wrap(line, columns)] or ["(nothing)"]
    if len(lines) > _MAX_CAPTION_LINES:
        lines = [*lines[: _MAX_CAPTION_LINES - 1], "…"]
    line_height = size * 5 // 4
    height = image.height + line_height * len(lines) + size
    drawn = Image.new("RGB", (width, height), "white")
    drawn.paste(image, ((width - image.width) // 2, 0))
    pen = ImageDraw.Draw(drawn)
    for number, line in enumerate(lines):
        top = image.height + size // 2 + number * line_height
        pen.text((size // 2, top), line, fill=color, font=font)
    return drawn
