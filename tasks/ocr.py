"""OCR: what does the text in the image say?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from vlm_grpo.parsing import MAX_CHARACTERS
from vlm_grpo.scoring import anls, character_error_rate, word_error_rate
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.types import Example

NORMALIZATIONS = ("case", "space", "nfkc", "punctuation")
# Marks that steer the writing direction and joins; they are not seen, and models leave them out.
_INVISIBLE = re.compile("[\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


class OCR(Task):
    """Read text; the gold answer is a string or a list of accepted strings.

    Both sides are compared in Unicode's composed form (NFC), without invisible direction marks
    and white space at their ends; everything else counts unless ``normalize`` names it.

    Attributes:
        normalize: what else does not count: "case" (letters' case), "space" (all white space),
            "nfkc" (full-width and other compatibility forms), "punctuation".
    """

    primary_metric = "exact"
    normalize: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = sorted(set(self.normalize) - set(NORMALIZATIONS))
        if isinstance(self.normalize, str) or unknown:
            raise ValueError(
                f"normalize is {self.normalize!r}; it must be a list of some of "
                f"{', '.join(NORMALIZATIONS)}"
            )

    def parse(self, text: str, example: Example) -> str | None:
        return text if len(text) <= MAX_CHARACTERS else None

    def write(self, answer: str, example: Example) -> str:
        return answer

    def gold_answer(self, example: Example) -> str:
        return _strings(example.answer)[0]

    def check(self, example: Example) -> None:
        if not (accepted := _strings(example.answer)):
            raise ValueError("the answer must be a string or a list of accepted strings")
        for text in accepted:
            if not isinstance(text, str) or not self._normal(text):
                raise ValueError(f"the answer {text!r} must be a string that is not empty")
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"an answer is longer than {MAX_CHARACTERS} characters")

    @reward(weight=0.5)
    def exact(self, answer: str, example: Example) -> float:
        """1 where the answer is an accepted one."""
        return float(self._normal(answer) in self._accepted(example))

    @reward(weight=0.5)
    def character_accuracy(self, answer: str, example: Example) -> float:
        """1 − character error rate, at least 0."""
        return 1.0 - self.cer(answer, example)

    @metric()
    def anls(self, answer: str, example: Example) -> float:
        """Average normalised Levenshtein similarity, per example."""
        return anls(self._normal(answer), self._accepted(example))

    @metric(without_answer=1.0)
    def cer(self, answer: str, example: Example) -> float:
        """Character error rate against the nearest accepted answer, cut off at 1."""
        normal = self._normal(answer)
        return min(character_error_rate(normal, gold) for gold in self._accepted(example))

    @metric()
    def word_accuracy(self, answer: str, example: Example) -> float:
        """1 − word error rate, at least 0; words are what white space separates."""
        normal = self._normal(answer)
        return 1.0 - min(word_error_rate(normal, gold) for gold in self._accepted(example))

    def _accepted(self, example: Example) -> list[str]:
        return [self._normal(text) for text in _strings(example.answer)]

    def _normal(self, text: str) -> str:
        text = unicodedata.normalize("NFKC" if "nfkc" in self.normalize else "NFC", text)
        text = _INVISIBLE.sub("", text)
        if "case" in self.normalize:
            text = text.casefold()
        if "punctuation" in self.normalize:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        if "space" in self.normalize:
            text = "".join(text.split())
        return text.strip()


def _strings(answer: str | Sequence[str]) -> Sequence[str]:
    if isinstance(answer, str):
        return [answer]
    return answer if isinstance(answer, list | tuple) else []
