"""Pointing: a point inside each named object, which also yields a verifiable count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.coordinates import gold_boxes
from vlm_grpo.task.drawing import draw_points
from vlm_grpo.task.parsing import parse_points
from vlm_grpo.task.scores import matched_mean
from vlm_grpo.tasks.graders.subjects import forget, is_about
from vlm_grpo.types import Example, LabeledBoxes

Points = tuple[tuple[float, float], ...]


class Pointing(Task):
    """Point at the named object, or at every such object; points are in original pixels.

    The gold answer is ``{"boxes": […]}``. A point is correct inside a box, edges included, and each
    box accepts one point. Points are JSON in every frame, ``{"point_2d": [x, y]}`` (Gemma 4:
    ``{"point": [y, x]}``).

    Attributes:
        several: ask for every such object; otherwise an answer with different points is invalid.
        max_points: largest number of points in a valid answer.
    """

    primary_metric = "inside"
    several: bool = False
    max_points: int = 100

    def question(self, example: Example) -> str:
        point = self.frame.describe_point(example.images[0].size)
        if self.several:
            return f"Point to every {example.question}. Answer with a list of {point}."
        return f"Point to {example.question}. Answer with {point}."

    def parse(self, text: str, example: Example) -> Points | None:
        if not is_about(text, example.question, finds=True):
            return None
        image, text = example.images[0], forget(text, example.question)
        points = parse_points(text, self.frame.describe_units(image.size), self.frame.y_first)
        if points is not None and not self.several:
            points = list(dict.fromkeys(points))
        if points is None or not self._allows(len(points)):
            return None
        boxes = (
            self.frame.to_pixels((x, y, x, y), image.size, image.resized_size) for x, y in points
        )
        return tuple((x, y) for x, y, _, _ in boxes)

    def write(self, answer: Points, example: Example) -> str:
        image = example.images[0]
        return self.frame.write_points(answer, image.size, image.resized_size)

    def gold_answer(self, example: Example) -> Points:
        """Return the centers of the gold boxes."""
        return tuple(
            ((x1 + x2) / 2, (y1 + y2) / 2) for x1, y1, x2, y2 in gold_boxes(example.answer)
        )

    def ask_about(self, objects: LabeledBoxes) -> Iterator[tuple[str, Any]]:
        for label, boxes in objects.group_by_label().items():
            if self._allows(len(boxes)):
                yield label, {"boxes": boxes}

    def check(self, example: Example) -> None:
        if not example.images:
            raise ValueError("there is no image to point into")
        if not self._allows(count := len(gold_boxes(example.answer))):
            raise ValueError(
                f"the answer has {count} boxes; it must have one, or up to "
                f"max_points={self.max_points} with several=true"
            )

    def draw(self, image: Image.Image, answer: Points, example: Example, color: str) -> Image.Image:
        return draw_points(image, answer, color)

    def _allows(self, count: int) -> bool:
        return count <= self.max_points if self.several else count == 1

    @reward(weight=1.0)
    def inside(self, answer: Points, example: Example) -> float:
        """Share of points matched one to one with a box; missing and extra points count as 0."""
        boxes = gold_boxes(example.answer)
        hits = [[x1 <= x <= x2 and y1 <= y <= y2 for x1, y1, x2, y2 in boxes] for x, y in answer]
        return matched_mean(np.array(hits, float).reshape(len(answer), len(boxes)))

    @metric()
    def count_exact(self, answer: Points, example: Example) -> float:
        """1 if there are as many points as boxes, else 0."""
        return float(len(answer) == len(gold_boxes(example.answer)))
