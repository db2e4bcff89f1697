"""Multiple choice: which of the options is right?"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.scores import accuracy_by_gold
from vlm_grpo.types import Example

MAX_CHARACTERS = 2_000  #: Maximum length of an answer and of an option
# Words that may stand before an answer: "The correct answer is B", "Option B", "Answer: B".
_LEAD = re.compile(
    r"(?:(?:so|thus|therefore|hence),? )?(?:the |my )?(?:(?:correct|right|best|final) )?"
    r"(?:answer|option|choice)(?: is)?(?:: ?| )",
    re.IGNORECASE,
)
# What models write around an answer.
_WRAPPERS = re.compile(
    r"\*\*([^*]*)\*\*|\$?\\boxed\{([^{}]*)\}\$?|```(?:\w+ )?([^`]*)```|`([^`]*)`|\"([A-Za-z])\""
)
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_LETTER_AND_TEXT = re.compile(r"(?:\(([A-Za-z])\)|([A-Za-z])(?:[.:),]| [-–—])) ?(.+)")
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
    dog"), or the text. A letter and the text of another option are no answer. What is both a
    letter of the list and the text of an option is the letter.

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
        text = " ".join(text.split())
        if _normalize(text) not in options:
            text = _WRAPPERS.sub(lambda found: found[found.lastindex or 0].strip(), text)
            text = _LEAD.sub("", text.strip("* "), count=1).strip("* ")
        if letter := _LETTER.fullmatch(text):
            place = ascii_uppercase.index(letter[1].upper())
            if place < len(order):
                return order[place]
        if _normalize(text) in options:
            return options.index(_normalize(text))
        if stated := _LETTER_AND_TEXT.fullmatch(text):
            place = ascii_uppercase.index((stated[1] or stated[2]).upper())
            if place < len(order) and options[order[place]] == _normalize(stated[3]):
                return order[place]
        return None

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


def _normalize(text: str) -> str:
    """Return a text without differences of case, Unicode form, white space and final period."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip("\"'`“”").removesuffix(".").strip()
