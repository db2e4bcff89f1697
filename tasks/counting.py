"""Counting: how many of the named objects are in the image?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

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
        """|answer − gold|; its mean is the MAE of the completions that hold an answer."""
        return float(abs(answer - example.answer))

    def corpus_metrics(
        self, answers: Sequence[int | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """RMSE of the completions that hold an answer, accuracy for each gold count, and what
        always giving the most frequent gold count would score (``majority_baseline``)."""
        if not examples:
            return {}
        golds = [example.answer for example in examples]
        pairs = list(zip(answers, golds, strict=True))
        found = {"majority_baseline": Counter(golds).most_common(1)[0][1] / len(golds)}
        squares = [(answer - gold) ** 2 for answer, gold in pairs if answer is not None]
        if squares:
            found["rmse"] = (sum(squares) / len(squares)) ** 0.5
        hits = defaultdict(list)
        for answer, gold in sorted(pairs, key=lambda pair: pair[1]):
            hits[gold].append(answer == gold)
        return found | {f"exact_of_{gold}": sum(hit) / len(hit) for gold, hit in hits.items()}
