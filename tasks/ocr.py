"""OCR: what does the text in the image say?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.parsing import MAX_CHARACTERS
from vlm_grpo.task.scores import anls, error_rate
from vlm_grpo.task.sentences import is_sure, unwrap
from vlm_grpo.tasks.graders.subjects import is_beside_it
from vlm_grpo.types import Example

NORMALIZATIONS = ("case", "space", "nfkc", "punctuation")
# Invisible marks of writing direction and joining, which models do not write.
_INVISIBLE = re.compile("[\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
# A sentence with one text in quotes.
_QUOTED = re.compile(r"([^\"“”«»\n]{0,200})[\"“«]([^\"“”«»]+)[\"”»]([^\"“”«»\n]{0,200})")
_ESCAPED = re.compile(r"\\([%$&#_])")


class OCR(Task):
    """Read text; the gold answer is a string or a list of accepted strings.

    The prompt asks for the text alone. Other forms are read unless a gold answer has them: the text
    in a code fence, in LaTeX's ``\\boxed{}``, in JSON, or as the only one in double quotes, alone
    or in a sentence about it (``The text in the image is "EXIT".``). Any other word around the text
    is part of the answer.

    Before the comparison both sides are converted to Unicode's composed form (NFC) and stripped of
    invisible direction marks and of white space at both ends.

    Attributes:
        normalize: further differences to ignore: "case" (upper and lower case), "space" (all white
            space), "nfkc" (full-width and other compatibility forms), "punctuation".
    """

    primary_metric = "exact"
    instruction: str | None = "Answer with the text alone."
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
        if len(text) > MAX_CHARACTERS:
            return None
        golds = _accepted_strings(example.answer)
        if any(_unwrap(gold, "") != gold for gold in golds):
            return text
        return _unwrap(text, example.question)

    def write(self, answer: str, example: Example) -> str:
        return answer

    def gold_answer(self, example: Example) -> str:
        return _accepted_strings(example.answer)[0]

    def check(self, example: Example) -> None:
        if not (accepted := _accepted_strings(example.answer)):
            raise ValueError("the answer must be a string or a list of accepted strings")
        for text in accepted:
            if not isinstance(text, str) or not self._normalize(text):
                raise ValueError(f"the answer {text!r} must be a non-empty string")
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"an answer is longer than {MAX_CHARACTERS} characters")

    @reward(weight=0.5)
    def exact(self, answer: str, example: Example) -> float:
        """1 if the answer is accepted, else 0."""
        return float(self._normalize(answer) in self._normalized_golds(example))

    @reward(weight=0.5)
    def character_accuracy(self, answer: str, example: Example) -> float:
        """1 − character error rate, at least 0."""
        return 1.0 - self.cer(answer, example)

    @metric()
    def anls(self, answer: str, example: Example) -> float:
        """Normalized Levenshtein similarity; its mean is the ANLS."""
        return anls(self._normalize(answer), self._normalized_golds(example))

    @metric(without_answer=1.0)
    def cer(self, answer: str, example: Example) -> float:
        """Character error rate against the nearest accepted answer, at most 1."""
        text = self._normalize(answer)
        return min(error_rate(text, gold) for gold in self._normalized_golds(example))

    @metric()
    def word_accuracy(self, answer: str, example: Example) -> float:
        """1 − word error rate, at least 0; words are separated by white space."""
        words, golds = self._normalize(answer).split(), self._normalized_golds(example)
        return 1.0 - min(error_rate(words, gold.split()) for gold in golds)

    def _normalized_golds(self, example: Example) -> list[str]:
        return [self._normalize(text) for text in _accepted_strings(example.answer)]

    def _normalize(self, text: str) -> str:
        text = unicodedata.normalize("NFKC" if "nfkc" in self.normalize else "NFC", text)
        text = _INVISIBLE.sub("", text).replace("\r\n", "\n")
        if "case" in self.normalize:
            text = text.casefold()
        if "punctuation" in self.normalize:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        if "space" in self.normalize:
            text = "".join(text.split())
        return text.strip()


def _accepted_strings(answer: str | Sequence[str]) -> Sequence[str]:
    if isinstance(answer, str):
        return [answer]
    return answer if isinstance(answer, list | tuple) else []


def _unwrap(text: str, question: str) -> str:
    text = _ESCAPED.sub(r"\1", unwrap(text, lead=False))
    quoted = _QUOTED.fullmatch(text)
    about = quoted is not None and not is_beside_it(quoted[1], question)
    return quoted[2] if quoted and about and is_sure(f"{quoted[1]}|{quoted[3]}") else text
