"""Grounding: where in the image is the object that an expression names?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.task.drawing import draw_boxes
from vlm_grpo.task.parsing import parse_boxes
from vlm_grpo.task.scores import giou_matrix, iou_matrix, matched_mean
from vlm_grpo.tasks.graders.subjects import forget, is_about
from vlm_grpo.types import Example, LabeledBoxes

Boxes = tuple[Box, ...]
# Tolerance for floating-point rounding of an IoU that equals a threshold.
_TOLERANCE = 1e-9
# Largest area of each of COCO's size classes, in square pixels.
_SIZES = {"small": 32**2, "medium": 96**2, "large": float("inf")}


class Grounding(Task):
    """Locate the named object; answers and gold answers are boxes in original pixels.

    With several boxes, "IoU" is the mean over the best one-to-one matching, in which a missing
    and an extra box each count as 0.

    Attributes:
        several: ask for every such object; otherwise an answer with different boxes is invalid.
        absent: allow the answer ``[]``, which states that there is no such object; otherwise it is
            invalid.
        max_boxes: largest number of boxes in a valid answer.
        loose: IoU threshold of the ``hit`` reward at the start of training.
        strict: the same at the end.
    """

    primary_metric = "accuracy_50"
    several: bool = False
    absent: bool = False
    max_boxes: int = 50
    loose: float = 0.5
    strict: float = 0.5

    def question(self, example: Example) -> str:
        box = self.frame.describe(example.images[0].size)
        none = ", or [] if there is none" if self.absent else ""
        if self.several:
            return f"Locate every {example.question}. Answer with a list of {box}{none}."
        return f"Locate {example.question}. Answer with its box as {box}{none}."

    def parse(self, text: str, example: Example) -> Boxes | None:
        if not is_about(text, example.question, finds=True):
            return None
        image, text = example.images[0], forget(text, example.question)
        found = parse_boxes(text, self.frame.describe_units(image.size), self.frame.y_first)
        if found is None:
            return None
        boxes = [box for box, _ in found]
        if not self.several:
            boxes = list(dict.fromkeys(boxes))
        if not self._allows(len(boxes)):
            return None
        return tuple(self.frame.to_pixels(box, image.size, image.resized_size) for box in boxes)

    def write(self, answer: Boxes, example: Example) -> str:
        image = example.images[0]
        return self.frame.write_all(answer, image.size, image.resized_size)

    def gold_answer(self, example: Example) -> Boxes:
        return gold_boxes(example.answer)

    def gold_reward(self, example: Example) -> float:
        image = example.images[0]
        boxes = self.gold_answer(example)
        return min(
            (self.frame.least_iou(b, image.size, image.resized_size) for b in boxes), default=1.0
        )

    def ask_about(self, objects: LabeledBoxes) -> Iterator[tuple[str, Any]]:
        for label, boxes in objects.group_by_label().items():
            if self._allows(len(boxes)):
                yield label, {"boxes": boxes}

    def check(self, example: Example) -> None:
        if not example.images:
            raise ValueError("there is no image to locate anything in")
        if not self._allows(count := len(gold_boxes(example.answer))):
            raise ValueError(
                f"the answer has {count} boxes; it must have one, or up to "
                f"max_boxes={self.max_boxes} with several=true, or none with absent=true"
            )

    def draw(self, image: Image.Image, answer: Boxes, example: Example, color: str) -> Image.Image:
        return draw_boxes(image, answer, color)

    def _allows(self, count: int) -> bool:
        least, most = int(not self.absent), self.max_boxes if self.several else 1
        return least <= count <= most

    @reward(weight=1.0)
    def iou(self, answer: Boxes, example: Example) -> float:
        """Intersection over union with the gold box; 1 if both state that there is none."""
        return matched_mean(iou_matrix(answer, self.gold_answer(example)))

    @reward(weight=0.0, optional=True)
    def giou(self, answer: Boxes, example: Example) -> float:
        """(1 + GIoU) / 2, which also distinguishes boxes that do not overlap.

        A box around the full image earns at least 0.5: use it together with ``iou``, not instead.
        """
        return matched_mean((1.0 + giou_matrix(answer, self.gold_answer(example))) / 2.0)

    @reward(weight=0.0, optional=True)
    def hit(self, answer: Boxes, example: Example) -> float:
        """1 if the IoU reaches a threshold, which moves from ``loose`` to ``strict``."""
        threshold = self.loose + (self.strict - self.loose) * self.progress
        return self._reaches(threshold, answer, example)

    @metric()
    def accuracy_50(self, answer: Boxes, example: Example) -> float:
        """1 if the IoU is at least 0.5."""
        return self._reaches(0.5, answer, example)

    @metric()
    def accuracy_75(self, answer: Boxes, example: Example) -> float:
        """1 if the IoU is at least 0.75."""
        return self._reaches(0.75, answer, example)

    @metric()
    def accuracy_90(self, answer: Boxes, example: Example) -> float:
        """1 if the IoU is at least 0.9."""
        return self._reaches(0.9, answer, example)

    def _reaches(self, threshold: float, answer: Boxes, example: Example) -> float:
        return float(self.iou(answer, example) >= threshold - _TOLERANCE)

    def corpus_metrics(
        self, answers: Sequence[Boxes | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Return ``accuracy_50`` and mean ``iou`` for small, medium and large objects, by COCO's
        areas. Only examples with one gold box count; a missing answer has an IoU of 0."""
        ious_by_size: dict[str, list[float]] = {name: [] for name in _SIZES}
        for answer, example in zip(answers, examples, strict=True):
            gold = self.gold_answer(example)
            if len(gold) == 1:
                x1, y1, x2, y2 = gold[0]
                area = (x2 - x1) * (y2 - y1)
                size = next(name for name, largest in _SIZES.items() if area <= largest)
                ious_by_size[size].append(0.0 if answer is None else self.iou(answer, example))
        metrics = {}
        for name, ious in ious_by_size.items():
            if ious:
                hits = [iou >= 0.5 - _TOLERANCE for iou in ious]
                metrics[f"accuracy_50_{name}"] = sum(hits) / len(hits)
                metrics[f"iou_{name}"] = sum(ious) / len(ious)
        return metrics
