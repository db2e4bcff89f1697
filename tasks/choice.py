"""Multiple choice: which of the options is right?"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.scores import accuracy_by_gold
from vlm_grpo.task.sentences import Candidate, choose, fold, is_sure, unwrap
from vlm_grpo.tasks.graders.subjects import is_beside_it
from vlm_grpo.types import Example

MAX_CHARACTERS = 2_000  #: Maximum length of an answer and of an option
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
# A letter in a sentence, where "A" and "I" before a word are no letters of options.
_LETTER_IN_TEXT = re.compile(
    r"(?<![^\W一-鿿])(?<!['’.-])(?![AI] (?!and\b|n?or\b|is\b)[a-z])([A-Z])(?![^\W一-鿿]|['’])"
)
# Options that refer to the letters or the places of others, or to letters in the image.
_REFERS = re.compile(
    r"\W*[A-Z]\W*|all of .*|none of .*|.*\bthe above\b.*"
    r"|.*\b(?:both|and|or|option|point|box|image|figure|answer) \(?[A-Z]\b.*",
    re.IGNORECASE,
)


class Choice(Task):
    """Choose one of several options; answers are letters or the text of an option.

    The gold answer is ``{"options": ["cat", "dog"], "answer": "dog"}``. Options are shown in an
    order that depends on the example's id only, so that it is the same in every process and
    epoch, and no position is right more often than another. Examples with an option that refers
    to letters or to other options ("Point B", "none of the above") keep the order of the row.

    An answer is a letter ("B", "(b)", "The answer is B."), a letter and its option's text ("B.
    dog"), the text, or a sentence with one of these. A letter and the text of another option are no
    answer. What is both a letter of the list and the text of an option is the letter.

    Attributes:
        shuffle: show the options in an order of each example's own; false: in that of the row.
    """

    primary_metric = "exact"
    instruction: str | None = "Answer with the letter of the right option alone."
    shuffle: bool = True

    def question(self, example: Example) -> str:
        options, order = example.answer["options"], self.order(example)
        shown = zip(ascii_uppercase, order, strict=False)
        return "\n".join([example.question, *(f"{letter}. {options[i]}" for letter, i in shown)])

    def prompt(self, example: Example) -> str:
        """Return the question and its options, and the instructions on a line of their own."""
        return "\n".join(filter(None, (self.question(example), self.instructions(example))))

    def order(self, example: Example) -> list[int]:
        """Return the numbers of the options in the order in which they are shown."""
        options = example.answer["options"]
        numbers = list(range(len(options)))
        if not self.shuffle or any(map(_REFERS.fullmatch, options)):
            return numbers
        keys = [f"{example.id}/{number}".encode(errors="backslashreplace") for number in numbers]
        return sorted(numbers, key=lambda number: hashlib.sha256(keys[number]).digest())

    def parse(self, text: str, example: Example) -> int | None:
        """Return the number of the chosen option in the row."""
        if len(text) > MAX_CHARACTERS:
            return None
        options = [_normalize(option) for option in example.answer["options"]]
        order = self.order(example)
        if _normalize(text) not in options:
            text = unwrap(text)
        text = " ".join(fold(text).split())
        if (letter := _LETTER.fullmatch(text)) and (place := _place(letter[1])) < len(order):
            return order[place]
        if _normalize(text) in options:
            return options.index(_normalize(text))
        if "no" in options and re.match("(?i:no)[,.;] ", text):  # what it denies is no doubt
            text = text[:4] + re.sub(r"\b(?:no|not)\b|n['’]t\b", "", text[4:])
        if is_beside_it(text, example.question):
            return None
        return choose(text, self._find_candidates(text, options, order))

    def _find_candidates(
        self, text: str, options: Sequence[str], order: Sequence[int]
    ) -> list[Candidate]:
        """Return the letters and the texts of options in a sentence."""
        found: list[Candidate] = []
        written = [pair for pair in enumerate(options) if any(map(str.isalnum, pair[1]))]
        for number, option in sorted(written, key=lambda pair: -len(pair[1])):
            pattern = rf"(?<![\w.-]){re.escape(option)}(?![\w%-]|[.,]\d)"
            if not is_sure(option):  # "no" is an option only as a sentence of its own
                pattern = rf"(?:(?<=[:.)\"(] )|(?<=[\"(])|^){re.escape(option)}(?=[.,;:\"!)]|$)"
            for place in re.finditer(pattern, text, re.IGNORECASE):
                if all(place.end() <= c.start or c.end <= place.start() for c in found):
                    found.append(Candidate(*place.span(), number))
        for letter in _LETTER_IN_TEXT.finditer(text):
            place = _place(letter[1])
            if place < len(order) and all(not c.start <= letter.start() < c.end for c in found):
                found.append(Candidate(*letter.span(), order[place]))
        return sorted(found)

    def write(self, answer: int, example: Example) -> str:
        return ascii_uppercase[self.order(example).index(answer)]

    def gold_answer(self, example: Example) -> int:
        return example.answer["options"].index(example.answer["answer"])

    def check(self, example: Example) -> None:
        answer = example.answer
        options = answer.get("options") if isinstance(answer, Mapping) else None
        if not isinstance(options, list | tuple) or not 2 <= len(options) <= len(ascii_uppercase):
            raise ValueError(
                f"the answer {answer!r:.200} must have 2 to {len(ascii_uppercase)} options: "
                '{"options": ["cat", "dog"], "answer": "dog"}'
            )
        for option in options:
            if not isinstance(option, str) or not _normalize(option):
                raise ValueError(f"option {option!r} must be a non-empty string")
            if len(option) > MAX_CHARACTERS:
                raise ValueError(f"an option is longer than {MAX_CHARACTERS} characters")
        if len({_normalize(option) for option in options}) < len(options):
            raise ValueError(f"two of the options {list(options)} are the same text")
        if answer.get("answer") not in options:
            raise ValueError(
                f"the answer {answer.get('answer')!r} must be the text of one of the options "
                f"{list(options)}"
            )

    @reward(weight=1.0)
    def exact(self, answer: int, example: Example) -> float:
        """1 for the right option, else 0."""
        return float(answer == self.gold_answer(example))

    @metric(without_answer=None)
    def first(self, answer: int, example: Example) -> float:
        """1 if the answer is the option shown first; its mean exceeds 1/n under a position bias."""
        return float(answer == self.order(example)[0])

    def corpus_metrics(
        self, answers: Sequence[int | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Return the accuracy by the letter of the right option, and the accuracy of always giving
        the most frequent one (``majority_baseline``)."""
        golds = [self.gold_answer(example) for example in examples]
        letters = [self.write(gold, e) for gold, e in zip(golds, examples, strict=True)]
        return accuracy_by_gold(letters, [a == g for a, g in zip(answers, golds, strict=True)])


def _place(letter: str) -> int:
    return ascii_uppercase.index(letter.upper())


def _normalize(text: str) -> str:
    """Return a text without differences of case, Unicode form, white space and final period."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip("\"'`“”").removesuffix(".").strip()
