"""A tool that enlarges a part of the image."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from vlm_grpo.task.coordinates import Box
from vlm_grpo.task.environment import Environment, tool
from vlm_grpo.task.tool_calls import ToolError
from vlm_grpo.types import Example, ToolCall

MOST_ASPECT = 100  #: longest side of a part, in its shortest


class Zoom(Environment):
    """Look closer at parts of the image.

    A row's ``evidence`` is a list of boxes in pixels of the image, at which a demonstration looks.

    Attributes:
        min_side: shorter parts are enlarged to this number of pixels; the model's own pixel budget
            holds for what it sees.
        least: sides of a part that are shorter are widened to this number of pixels of the image.
    """

    min_side: int = 336
    least: int = 28

    @tool
    def zoom(self, bbox_2d: Box, label: str = "") -> Image.Image:
        """Look closer at a part of the image.

        Args:
            bbox_2d: the part to enlarge.
            label: what is in it.
        """
        width, height = self.image.size
        x1, x2 = _widen(bbox_2d[0], bbox_2d[2], min(self.least, width), width)
        y1, y2 = _widen(bbox_2d[1], bbox_2d[3], min(self.least, height), height)
        if max(x2 - x1, y2 - y1) > MOST_ASPECT * min(x2 - x1, y2 - y1):
            raise ToolError("the part is too thin")
        part = self.image.crop((x1, y1, x2, y2))
        scale = max(1.0, self.min_side / min(part.size))
        size = round(part.width * scale), round(part.height * scale)
        return part.resize(size, Image.Resampling.LANCZOS) if size != part.size else part

    def preview(self, example: Example) -> Sequence[tuple[int, int]]:
        sizes = [image.size for image in example.images[:1]]  # a part may be the whole image
        scales = [max(1.0, self.min_side / min(size)) for size in sizes]
        return [(round(w * s), round(h * s)) for (w, h), s in zip(sizes, scales, strict=True)]

    def demonstrate(self, example: Example) -> Sequence[ToolCall]:
        boxes = example.meta.get("evidence", ())
        return [ToolCall("zoom", {"bbox_2d": list(box)}) for box in boxes]


def _widen(low: float, high: float, least: int, limit: int) -> tuple[int, int]:
    """Return the whole pixels of a range, at least this many, inside the limit."""
    first, last = int(low), min(limit, -int(-high // 1))
    if last - first < least:
        first = max(0, min((first + last - least) // 2, limit - least))
        last = first + least
    return first, last
