"""Counting: how many of the named objects are in the image?"""

from __future__ import annotations

from vlm_grpo.parsing import parse_integer
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.types import Example


class Counting(Task):
    """Count the named objects in one image; the gold answer is an integer."""

    headline = "exact"

    def parse(self, text: str, example: Example) -> int | None:
        return parse_integer(text)

    def write(self, answer: int, example: Example) -> str:
        return str(answer)

    def check(self, example: Example) -> None:
        answer = example.answer
        if not isinstance(answer, int) or isinstance(answer, bool) or answer < 0:
            raise ValueError(f"the answer {answer!r} is no whole number of at least 0")

    @reward(weight=1.0)
    def exact(self, answer: int, example: Example) -> float:
        """1 for the right count, else 0."""
        return float(answer == example.answer)

    @reward(weight=0.0)
    def closeness(self, answer: int, example: Example) -> float:
        """1 − |error| / gold, at least 0: falls off with the relative error."""
        return max(0.0, 1.0 - abs(answer - example.answer) / max(1, example.answer))

    @metric(without_answer=None)
    def absolute_error(self, answer: int, example: Example) -> float:
        return float(abs(answer - example.answer))
