"""Grounding: where in the image is the object that an expression names?"""

from __future__ import annotations

from PIL import Image, ImageDraw

from vlm_grpo.coordinates import Box
from vlm_grpo.parsing import parse_boxes
from vlm_grpo.scoring import matched_iou
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.types import Example

Boxes = tuple[Box, ...]
# The rounding of floating-point numbers must not decide about a box that just reaches a threshold.
_ROUNDING = 1e-9


class Grounding(Task):
    """Locate one object; answers are boxes in original pixels, as is the gold answer."""

    headline = "accuracy_50"

    def question(self, example: Example) -> str:
        how = self.frame.describe(example.images[0].size)
        return f"Locate {example.question}. Answer with its box as {how}."

    def parse(self, text: str, example: Example) -> Boxes | None:
        boxes = parse_boxes(text)
        if boxes is None or len(boxes) != 1:
            return None
        image = example.images[0]
        return tuple(self.frame.to_pixels(box, image.size, image.seen) for box, _ in boxes)

    def write(self, answer: Boxes, example: Example) -> str:
        image = example.images[0]
        return self.frame.write_all(answer, image.size, image.seen)

    def gold_answer(self, example: Example) -> Boxes:
        return tuple(tuple(map(float, box)) for box in example.answer["boxes"])  # type: ignore[misc]

    def check(self, example: Example) -> None:
        boxes = example.answer.get("boxes") if isinstance(example.answer, dict) else None
        if not example.images or not isinstance(boxes, list) or len(boxes) != 1:
            raise ValueError('an image and an answer {"boxes": [[x1, y1, x2, y2]]} are needed')
        for box in boxes:
            x1, y1, x2, y2 = box
            if not (x1 < x2 and y1 < y2):
                raise ValueError(f"box {box} must have x1 < x2 and y1 < y2")

    def draw(self, image: Image.Image, answer: Boxes, example: Example, color: str) -> Image.Image:
        drawn = image.copy()
        pen = ImageDraw.Draw(drawn)
        for box in answer:
            pen.rectangle(box, outline=color, width=max(1, max(image.size) // 200))
        return drawn

    @reward(weight=1.0)
    def iou(self, answer: Boxes, example: Example) -> float:
        """Intersection over union with the gold box."""
        return matched_iou(answer, self.gold_answer(example))

    @metric()
    def accuracy_50(self, answer: Boxes, example: Example) -> float:
        """1 where the IoU is at least 0.5."""
        return float(self.iou(answer, example) >= 0.5 - _ROUNDING)

    @metric()
    def accuracy_75(self, answer: Boxes, example: Example) -> float:
        """1 where the IoU is at least 0.75."""
        return float(self.iou(answer, example) >= 0.75 - _ROUNDING)

    @metric()
    def accuracy_90(self, answer: Boxes, example: Example) -> float:
        """1 where the IoU is at least 0.9."""
        return float(self.iou(answer, example) >= 0.9 - _ROUNDING)
