"""OCR: what does the text in the image say?"""

from __future__ import annotations

from collections.abc import Sequence

from vlm_grpo.parsing import MAX_CHARACTERS
from vlm_grpo.scoring import anls, character_error_rate
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.types import Example


class OCR(Task):
    """Read text; the gold answer is a string or a list of accepted strings."""

    headline = "exact"

    def parse(self, text: str, example: Example) -> str | None:
        return text if len(text) <= MAX_CHARACTERS else None

    def write(self, answer: str, example: Example) -> str:
        return answer

    def gold_answer(self, example: Example) -> str:
        return self._accepted(example)[0]

    def check(self, example: Example) -> None:
        accepted = example.answer
        if isinstance(accepted, str):
            accepted = [accepted]
        if not isinstance(accepted, list) or not accepted:
            raise ValueError("the answer must be a string or a list of accepted strings")
        for text in accepted:
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"the answer {text!r} must be a string that is not empty")

    @reward(weight=0.5)
    def exact(self, answer: str, example: Example) -> float:
        """1 where the answer is an accepted one, letters' case included."""
        return float(answer in self._accepted(example))

    @reward(weight=0.5)
    def character_accuracy(self, answer: str, example: Example) -> float:
        """1 − character error rate, at least 0."""
        return 1.0 - self.cer(answer, example)

    @metric()
    def anls(self, answer: str, example: Example) -> float:
        """Average normalised Levenshtein similarity, per example."""
        return anls(answer, self._accepted(example))

    @metric(without_answer=1.0)
    def cer(self, answer: str, example: Example) -> float:
        """Character error rate against the nearest accepted answer, cut off at 1."""
        return min(character_error_rate(answer, gold) for gold in self._accepted(example))

    def _accepted(self, example: Example) -> Sequence[str]:
        answers = [example.answer] if isinstance(example.answer, str) else example.answer
        return [text.strip() for text in answers]
