"""Detection: every object of the named kinds, each with a box and a label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.task.drawing import draw_boxes
from vlm_grpo.task.parsing import parse_boxes
from vlm_grpo.task.scores import f1, iou_matrix, match
from vlm_grpo.tasks.graders.average_precision import coco_average_precision
from vlm_grpo.types import Example, LabeledBoxes

Objects = tuple[tuple[Box, str], ...]
# COCO's ten IoU thresholds, lowered slightly so that an IoU that equals one counts as a hit.
_THRESHOLDS = np.arange(0.5, 1.0, 0.05) - 1e-9
# "a cat at [1, 2, 3, 4] and no dog"
_ABSENT = re.compile(r"[\])],? (?:and|but) (?:there (?:is|are) )?no ([a-z]+)\.?\s*\Z")


class Detection(Task):
    """Find all objects of the kinds that the question names; boxes are in original pixels.

    The gold answer is ``{"boxes": […], "labels": […]}``. The boxes of each label are matched one to
    one, so missing, extra and duplicate boxes and unknown labels all lower the reward.

    Attributes:
        max_boxes: largest number of boxes in a valid answer.
    """

    primary_metric = "f1_50"
    max_boxes: int = 100

    def question(self, example: Example) -> str:
        box = self.frame.describe(example.images[0].size)
        return f"Detect every {example.question}. Answer with a list of {box}, each with its label."

    def parse(self, text: str, example: Example) -> Objects | None:
        image = example.images[0]
        if (absent := _ABSENT.search(text)) and absent[1] in example.question:
            text = text[: absent.start() + 1]
        boxes = parse_boxes(
            text, self.frame.describe_units(image.size), self.frame.y_first, named=True
        )
        if boxes is None or len(boxes) > self.max_boxes:
            return None
        objects = [
            (self.frame.to_pixels(box, image.size, image.resized_size), _normalize_label(label))
            for box, label in boxes
            if label is not None
        ]
        return tuple(objects) if len(objects) == len(boxes) else None

    def write(self, answer: Objects, example: Example) -> str:
        image = example.images[0]
        boxes, labels = [box for box, _ in answer], [label for _, label in answer]
        return self.frame.write_all(boxes, image.size, image.resized_size, labels)

    def gold_answer(self, example: Example) -> Objects:
        labels = [_normalize_label(label) for label in example.answer["labels"]]
        return tuple(zip(gold_boxes(example.answer), labels, strict=True))

    def gold_reward(self, example: Example) -> float:
        image = example.images[0]
        boxes = [box for box, _ in self.gold_answer(example)]
        least = [self.frame.least_iou(box, image.size, image.resized_size) for box in boxes]
        return float(np.mean(min(least, default=1.0) >= _THRESHOLDS))

    def ask_about(self, objects: LabeledBoxes) -> list[tuple[str, Any]]:
        boxes = [list(box) for box in objects.boxes]
        answer = {"boxes": boxes, "labels": list(objects.labels)}
        return [(", ".join(objects.categories), answer)]

    def check(self, example: Example) -> None:
        boxes = gold_boxes(example.answer)
        labels = example.answer.get("labels")
        if not example.images:
            raise ValueError("there is no image to detect anything in")
        if not isinstance(labels, list) or len(labels) != len(boxes):
            raise ValueError(f"the answer's labels {labels!r} must name each of {len(boxes)} boxes")
        if not all(isinstance(label, str) and label.strip() for label in labels):
            raise ValueError(f"the labels {labels!r} must be non-empty strings")
        if crowd := example.meta.get("crowd"):
            gold_boxes(crowd)
        if len(boxes) > self.max_boxes:
            raise ValueError(f"there are {len(boxes)} boxes, more than max_boxes={self.max_boxes}")

    def draw(
        self, image: Image.Image, answer: Objects, example: Example, color: str
    ) -> Image.Image:
        return draw_boxes(image, [box for box, _ in answer], color, [name for _, name in answer])

    @reward(weight=1.0)
    def f1_mean(self, answer: Objects, example: Example) -> float:
        """Mean F1 over the IoU thresholds 0.50, 0.55, …, 0.95: a dense reward for exact boxes."""
        return sum(self._f1(t, answer, example) for t in _THRESHOLDS) / len(_THRESHOLDS)

    @metric()
    def f1_50(self, answer: Objects, example: Example) -> float:
        """F1 of the boxes matched at an IoU of at least 0.5."""
        return self._f1(_THRESHOLDS[0], answer, example)

    def _f1(self, threshold: float, answer: Objects, example: Example) -> float:
        gold = self.gold_answer(example)
        overlaps = iou_matrix([box for box, _ in answer], [box for box, _ in gold])
        same_label = np.array([[a == g for _, g in gold] for _, a in answer], bool)
        hits = (overlaps >= threshold) & same_label.reshape(overlaps.shape)
        return f1(sum(bool(hits[pair]) for pair in match(hits)), len(answer), len(gold))

    def corpus_metrics(
        self, answers: Sequence[Objects | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Return COCO's ``ap``, ``ap_50`` and ``ap_75``; a missing answer counts as no boxes.

        Boxes on a crowd region, which ``meta["crowd"]`` gives in the form of an answer, are not
        errors.
        """
        detections = [answer or () for answer in answers]
        golds = [self.gold_answer(example) for example in examples]
        crowds = [
            self.gold_answer(replace(example, answer=example.meta["crowd"]))
            if example.meta.get("crowd")
            else ()
            for example in examples
        ]
        return coco_average_precision(detections, golds, crowds)


def _normalize_label(label: str) -> str:
    return " ".join(label.casefold().removesuffix(".").split())
