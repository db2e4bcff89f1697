"""Documents: write a page as markdown, checked by unit tests or against its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from vlm_grpo.task import Task, reward
from vlm_grpo.task.scores import match
from vlm_grpo.tasks.graders.page_tests import Page, Test, check_test, normalize, write_page
from vlm_grpo.tasks.graders.tables import import_extra
from vlm_grpo.types import Example

MAX_CHARACTERS = 50_000  #: Maximum length of a page's text
MAX_BLOCKS = 400  #: Maximum number of paragraphs of a page that are matched
_GAP = re.compile(r"\n\s*\n")  # empty lines between blocks, with any line ends
_MOST_TIMES, _MOST_MORE = 3, 1_000
"""Most letters of an answer: the first number times those of the gold text, plus the second."""


class Document(Task):
    """Write a page as markdown; the gold answer is ``{"tests": […], "text": "…"}`` or one of both.

    Tests are rows of olmOCR-Bench: a text is present or absent, or before another; a cell is in a
    table next to others; a formula is there; the output is sound. They are described in
    ``vlm_grpo.tasks.graders.page_tests``. Metrics against the text are computed for the examples
    that have one.
    """

    primary_metric = "passed"
    instruction: str | None = (
        "Write the page as markdown, with tables in HTML and formulas in LaTeX between \\( and \\) "
        "or \\[ and \\]. Leave out headers, footers and page numbers."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lxml.etree", "latex2mathml.converter", "fuzzysearch"):
            import_extra(name)

    def parse(self, text: str, example: Example) -> str | None:
        fenced = re.fullmatch(r"\s*```\w*\n((?:(?!```).)*)```\s*", text, re.DOTALL)
        return (fenced[1] if fenced else text) if len(text) <= MAX_CHARACTERS else None

    def write(self, answer: str, example: Example) -> str:
        return answer

    def check(self, example: Example) -> None:
        answer = example.answer
        if not isinstance(answer, dict) or not (answer.get("tests") or answer.get("text")):
            raise ValueError('the answer must be {"tests": […], "text": "…"} or one of both')
        tests, text = answer.get("tests"), answer.get("text")
        if not isinstance(tests, list | tuple | None) or not isinstance(text, str | None):
            raise ValueError("tests must be a list, and text a text")
        if text is not None and not 0 < len(text.strip()) <= MAX_CHARACTERS:
            raise ValueError(f"the text must have 1 to {MAX_CHARACTERS:,} characters")
        for test in tests or ():
            check_test(test)
        for name in ("similarity", "order"):
            if text is None and self.reward_weights().get(name):
                raise ValueError(f"the reward {name} needs the page's text: add it")

    def gold_answer(self, example: Example) -> str:
        return example.answer.get("text") or write_page(example.answer["tests"])

    @reward(weight=1.0)
    def passed(self, answer: str, example: Example) -> float:
        """Share of the tests that pass; without tests, 1 − edit distance to the text.

        If the page has tests of what it must contain, one of them must pass: any letter passes
        those of what is absent. If it has a text, an answer of many more letters passes none: a
        table of all names and numbers has every cell.
        """
        if not _get_tests(example):
            return self.similarity(answer, example)
        text = example.answer.get("text")
        if text and _count_letters(answer) > _MOST_TIMES * _count_letters(text) + _MOST_MORE:
            return 0.0
        pairs = list(zip(_get_tests(example), self._run(answer, example), strict=True))
        needed = [result for test, result in pairs if test["type"] not in ("absent", "baseline")]
        if needed and not any(needed):
            return 0.0
        return sum(result for _, result in pairs) / len(pairs)

    @reward(weight=0.0, optional=True)
    def similarity(self, answer: str, example: Example) -> float:
        """1 − edit distance to the gold text, divided by the longer text."""
        return 1.0 - edit_distance(answer, example.answer["text"])

    @reward(weight=0.0, optional=True)
    def order(self, answer: str, example: Example) -> float:
        """1 − edit distance of the reading order, see ``order_distance``."""
        return 1.0 - order_distance(answer, example.answer["text"])

    def corpus_metrics(
        self, answers: Sequence[Any | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Return the means over the examples that have a text or tests, and ``category_mean``: the
        mean over the tests' categories of the share that passes. No answer has the distance 1.
        """
        pairs = list(zip(answers, examples, strict=True))
        texts = [(answer, e.answer["text"]) for answer, e in pairs if e.answer.get("text")]
        values = {}
        for name, distance in (
            ("edit_distance", edit_distance),
            ("order_distance", order_distance),
        ):
            if texts:
                found = [
                    1.0 if answer is None else distance(answer, gold) for answer, gold in texts
                ]
                values[name] = float(np.mean(found))
        categories: dict[str, list[bool]] = {}
        for answer, example in pairs:
            tests = _get_tests(example)
            results = self._run(answer, example) if answer is not None else [False] * len(tests)
            for test, result in zip(tests, results, strict=True):
                categories.setdefault(test.get("category", test["type"]), []).append(result)
        if categories:
            values["category_mean"] = float(np.mean([np.mean(v) for v in categories.values()]))
        return values

    def _run(self, answer: str, example: Example) -> list[bool]:
        page = Page(answer)
        return [page.passes(test) for test in _get_tests(example)]


def _count_letters(text: str) -> int:
    return sum(map(str.isalnum, re.sub("<[^<>]*>", "", text)))


def _get_tests(example: Example) -> Sequence[Test]:
    return example.answer.get("tests") or ()


def edit_distance(answer: str, gold: str) -> float:
    """Compute the edit distance of normalized texts, divided by the longer one."""
    return Levenshtein.normalized_distance(normalize(answer).strip(), normalize(gold).strip())


def order_distance(answer: str, gold: str) -> float:
    """Compute the normalized edit distance between the order of a page's blocks and that of gold.

    Blocks, separated by empty lines, are matched one to one by the similarity of their texts; those
    less than half similar stay unmatched. The orders compared are those of the matched gold blocks
    in the answer, and of all gold blocks.
    """
    blocks, golds = (
        [text for part in _GAP.split(page) if (text := normalize(part).strip())][:MAX_BLOCKS]
        for page in (answer, gold)
    )
    if not blocks:
        return 1.0
    similar = np.array([[Levenshtein.normalized_similarity(b, g) for g in golds] for b in blocks])
    found = [gold for block, gold in sorted(match(similar)) if similar[block, gold] >= 0.5]
    return Levenshtein.normalized_distance(found, list(range(len(golds))))
