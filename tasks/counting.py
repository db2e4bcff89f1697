"""Counting: how many of the named objects are in the image?"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence

from PIL import Image

from vlm_grpo.drawing import draw_points
from vlm_grpo.parsing import parse_integer, parse_points
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.types import Example

Points = tuple[tuple[float, float], ...]


class Counting(Task):
    """Count the named objects in one image; the gold answer is an integer.

    Attributes:
        points: ask for a point on each object instead of a number, and count the points. Two
            equal points are no answer. Where the gold answer has boxes, the task ``pointing``
            checks the places too.
    """

    primary_metric = "exact"
    points: bool = False

    def question(self, example: Example) -> str:
        if not self.points:
            return example.question
        how = self.frame.describe(example.images[0].size, form='{"point_2d": [x, y]}')
        return f"{example.question} Answer with a list of {how}, one for each."

    def parse(self, text: str, example: Example) -> int | Points | None:
        if not self.points:
            return parse_integer(text)
        points = parse_points(text)
        if points is None or len(set(points)) < len(points):
            return None
        image = example.images[0]
        boxes = (
            self.frame.to_pixels((x, y, x, y), image.size, image.resized_size) for x, y in points
        )
        return tuple((x, y) for x, y, _, _ in boxes)

    def write(self, answer: int | Points, example: Example) -> str:
        if not self.points:
            return str(answer)
        # Nobody knows the places of a gold count: any will do.
        count = answer if isinstance(answer, int) else len(answer)
        return json.dumps([{"point_2d": [place, place]} for place in range(count)])

    def check(self, example: Example) -> None:
        answer = example.answer
        if not isinstance(answer, int) or isinstance(answer, bool) or answer < 0:
            raise ValueError(f"the answer {answer!r} is no whole number of at least 0")
        if self.points and not example.images:
            raise ValueError("there is no image to point into")

    def draw(
        self, image: Image.Image, answer: int | Points, example: Example, color: str
    ) -> Image.Image:
        return image if isinstance(answer, int) else draw_points(image, answer, color)

    @reward(weight=1.0)
    def exact(self, answer: int | Points, example: Example) -> float:
        """1 for the right count, else 0."""
        return float(_count(answer) == example.answer)

    @reward(weight=0.0)
    def closeness(self, answer: int | Points, example: Example) -> float:
        """1 − |error| / gold, at least 0: falls off with the relative error."""
        return max(0.0, 1.0 - abs(_count(answer) - example.answer) / max(1, example.answer))

    @metric(without_answer=None)
    def absolute_error(self, answer: int | Points, example: Example) -> float:
        """|answer − gold|; its mean is the MAE of the completions that hold an answer."""
        return float(abs(_count(answer) - example.answer))

    def corpus_metrics(
        self, answers: Sequence[int | Points | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """RMSE of the completions that hold an answer, accuracy for each gold count, and what
        always giving the most frequent gold count would score (``majority_baseline``)."""
        if not examples:
            return {}
        golds = [example.answer for example in examples]
        counts = [None if answer is None else _count(answer) for answer in answers]
        pairs = list(zip(counts, golds, strict=True))
        found = {"majority_baseline": Counter(golds).most_common(1)[0][1] / len(golds)}
        squares = [(count - gold) ** 2 for count, gold in pairs if count is not None]
        if squares:
            found["rmse"] = (sum(squares) / len(squares)) ** 0.5
        hits = defaultdict(list)
        for count, gold in sorted(pairs, key=lambda pair: pair[1]):
            hits[gold].append(count == gold)
        return found | {f"exact_of_{gold}": sum(hit) / len(hit) for gold, hit in hits.items()}


def _count(answer: int | Points) -> int:
    return answer if isinstance(answer, int) else len(answer)
