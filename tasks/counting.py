"""Counting: how many of the named objects are in the image?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.drawing import draw_points
from vlm_grpo.task.parsing import MAX_DIGITS, parse_integer, parse_points
from vlm_grpo.task.scores import accuracy_by_gold
from vlm_grpo.tasks.graders.subjects import is_about
from vlm_grpo.types import Example, LabeledBoxes

Points = tuple[tuple[float, float], ...]


class Counting(Task):
    """Count the named objects in one image; the gold answer is an integer.

    Attributes:
        points: ask for a point on each object instead of a number, and count the points. An answer
            with two equal points is invalid. To check the positions too, use the task ``pointing``,
            which needs gold boxes.
    """

    primary_metric = "exact"
    points: bool = False

    def question(self, example: Example) -> str:
        if not self.points:
            return example.question
        point = self.frame.describe_point(example.images[0].size)
        return f"{example.question} Answer with a list of {point}, one for each."

    def parse(self, text: str, example: Example) -> int | Points | None:
        if not self.points:
            return parse_integer(text) if is_about(text, example.question, counts=True) else None
        image = example.images[0]
        points = parse_points(text, self.frame.describe_units(image.size), self.frame.y_first)
        if points is None or len(set(points)) < len(points):
            return None
        boxes = (
            self.frame.to_pixels((x, y, x, y), image.size, image.resized_size) for x, y in points
        )
        return tuple((x, y) for x, y, _, _ in boxes)

    def write(self, answer: int | Points, example: Example) -> str:
        if not self.points:
            return str(answer)
        # A gold count has no positions, so any distinct points do.
        count = answer if isinstance(answer, int) else len(answer)
        key = "point" if self.frame.y_first else "point_2d"
        return json.dumps([{key: [index, index]} for index in range(count)])

    def ask_about(self, objects: LabeledBoxes) -> Iterator[tuple[str, Any]]:
        for label, boxes in objects.group_by_label().items():
            yield f'How many instances of "{label}" are in the image?', len(boxes)

    def check(self, example: Example) -> None:
        answer = example.answer
        if not isinstance(answer, int) or isinstance(answer, bool) or answer < 0:
            raise ValueError(f"the answer {answer!r} must be an integer of at least 0")
        if answer >= 10**MAX_DIGITS:
            raise ValueError(f"the answer must be an integer of at most {MAX_DIGITS} digits")
        if self.points and not example.images:
            raise ValueError("there is no image to point into")

    def draw(
        self, image: Image.Image, answer: int | Points, example: Example, color: str
    ) -> Image.Image:
        return image if isinstance(answer, int) else draw_points(image, answer, color)

    @reward(weight=1.0)
    def exact(self, answer: int | Points, example: Example) -> float:
        """1 for the correct count, else 0."""
        return float(_count(answer) == example.answer)

    @reward(weight=0.0)
    def closeness(self, answer: int | Points, example: Example) -> float:
        """1 − |answer − gold| / gold, at least 0."""
        return max(0.0, 1.0 - abs(_count(answer) - example.answer) / max(1, example.answer))

    @metric(without_answer=None)
    def absolute_error(self, answer: int | Points, example: Example) -> float:
        """|answer − gold|; its mean is the MAE over completions with an answer."""
        return float(abs(_count(answer) - example.answer))

    def corpus_metrics(
        self, answers: Sequence[int | Points | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Return the RMSE over completions with an answer, the accuracy per gold count, and the
        accuracy of always answering the most frequent gold count (``majority_baseline``)."""
        golds = [example.answer for example in examples]
        counts = [None if answer is None else _count(answer) for answer in answers]
        pairs = list(zip(counts, golds, strict=True))
        metrics = accuracy_by_gold(golds, [count == gold for count, gold in pairs])
        squares = [(count - gold) ** 2 for count, gold in pairs if count is not None]
        return metrics | ({"rmse": (sum(squares) / len(squares)) ** 0.5} if squares else {})


def _count(answer: int | Points) -> int:
    return answer if isinstance(answer, int) else len(answer)
