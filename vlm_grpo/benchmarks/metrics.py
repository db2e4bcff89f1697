"""The scoring rules of public benchmarks where they differ from ``scoring``.

Each follows the benchmark's own script, down to what looks odd in it, because a number that is to
stand beside published ones must be counted as they were. Nothing here knows models or files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rapidfuzz.distance import Levenshtein

MAX_CHARACTERS = 20_000
"""Longer outputs are cut off: edit distances are quadratic, and no answer is this long."""


def ocrbench(text: str, answers: Sequence[str], dataset: str) -> float:
    """OCRBench v1: 1 where an answer is a part of the text.

    Case does not count, but for handwritten formulas (dataset HME100k), where blanks do not.

    Source: Liu et al. 2024, OCRBench; the authors' example.py.

    >>> ocrbench("It says CENTRE.", ["centre"], "IIIT5K")
    1.0
    >>> ocrbench("X ^ 2", ["x^2"], "HME100k")
    0.0
    """
    if dataset == "HME100k":
        return float(any(_one_line(a).replace(" ", "") in _dense(text) for a in answers))
    return float(any(_one_line(a.lower()) in _one_line(text.lower()) for a in answers))


def ocrbench_v2(text: str, answers: Sequence[str], kind: str, rule: str | None = None) -> float:
    """OCRBench v2 for the kinds of question whose answer is a short text; see ``OCRBENCH_V2``.

    Args:
        text: the model's answer.
        answers: the accepted answers.
        kind: the question's ``type``, as "text recognition en".
        rule: its ``eval`` field: "multiple choice", "case sensitive", "exact match",
            "regression", or None.

    Source: Fu et al. 2025, OCRBench v2; the authors' eval.py and vqa_metric.py.

    >>> ocrbench_v2("the answer is B", ["B"], "science QA en", "multiple choice")
    0.0
    >>> ocrbench_v2("8", ["10"], "text counting en", "regression")
    0.8
    """
    if kind.startswith("formula recognition"):
        plain = _without_text_tags if kind.endswith("cn") else str
        return float(any(_dense(plain(answer)) in _dense(plain(text)) for answer in answers))
    if rule == "multiple choice":
        return float("".join(c for c in text if c.isalpha()) == answers[0])
    if kind == "text counting en":
        return max(_counted(text, answer, rule) for answer in answers)
    if kind.endswith("cn") and rule is None:
        return max(_in_or_near(_dense(text.lower()), _dense(a.lower()), ",", 4) for a in answers)
    case = str if rule == "case sensitive" else str.lower
    return max(_in_or_near(_one_line(case(text)), _one_line(case(a)), None, 5) for a in answers)


OCRBENCH_V2: Mapping[str, str] = {
    "text recognition en": "text recognition",
    "formula recognition en": "element parsing",
    "math QA en": "mathematical calculation",
    "text counting en": "mathematical calculation",
    "document classification en": "visual text understanding",
    "cognition VQA en": "visual text understanding",
    "diagram QA en": "visual text understanding",
    "reasoning VQA en": "knowledge reasoning",
    "science QA en": "knowledge reasoning",
    "APP agent en": "knowledge reasoning",
    "ASCII art classification en": "knowledge reasoning",
    "formula recognition cn": "element parsing cn",
    "cognition VQA cn": "visual text understanding cn",
    "reasoning VQA cn": "knowledge reasoning cn",
}
"""Question types that ``ocrbench_v2`` scores, and the category each counts in.

The rest (tables, documents, charts, key information, spotting, grounding, full pages, translation)
are scored by tree edit distance, spotting scripts or BLEU and METEOR, which are not here: a mean
over these categories is no OCRBench v2 score, and must not be called one.
"""


def vqa_accuracy(text: str, answers: Sequence[str], places: int = 10) -> float:
    """VQA accuracy, as TextVQA has it.

    Leaving each of the people's answers out in turn, min(1, matches among the others / 3); the
    mean of these. Both sides are normalised, also where everybody agrees.

    Args:
        text: the model's answer.
        answers: the people's answers; empty ones may be missing.
        places: how many people were asked, empty answers included.

    Source: Antol et al. 2015, VQA; Singh et al. 2019, TextVQA; the M4C evaluator.

    >>> vqa_accuracy("two", ["2", "2", "2"] + ["3"] * 7)
    0.9
    """
    normal = normalize_vqa(text)
    matches = sum(normal == normalize_vqa(answer) for answer in answers)
    if not matches:
        return 0.0
    # Leaving out one of the matching answers leaves one match less.
    left_out = matches * min(1.0, (matches - 1) / 3) + (places - matches) * min(1.0, matches / 3)
    return left_out / places


def normalize_vqa(text: str) -> str:
    """An answer as VQA's evaluation server compares it.

    Lower case; number words to ten as digits; no articles, commas and question marks; a mark that
    stands beside a blank vanishes, and one inside a word becomes a blank; contractions get their
    apostrophe.

    >>> normalize_vqa("The  Seven-Eleven store,  isnt it?")
    "7 eleven store isn't it"
    """
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    text = text.replace("\n", " ").replace("\t", " ").strip()
    plain = text
    for mark in _MARKS:
        beside_blank = f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if beside_blank else " ")
    plain = re.sub(r"\.(?!\d)", "", plain)
    words = [_NUMBERS.get(word, word) for word in plain.split()]
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


def anls_rrc(text: str, answers: Sequence[str]) -> float:
    """ANLS as the Robust Reading Competition's script counts it.

    It differs from the paper (``scoring.anls``) in two ways: a similarity of exactly 0.5 is kept,
    and the distance is divided by the length with the blanks that were stripped before it was
    taken, so that padding an answer raises it.

    >>> anls_rrc("ab", ["ax"]), anls_rrc("ab" + 20 * " ", ["xy"])
    (0.5, 0.9090909090909091)
    """
    best = 0.0
    for answer in answers:
        first, second = " ".join(text.lower().split()), " ".join(answer.lower().split())
        length = max(len(text), len(answer))
        distance = Levenshtein.distance(first[:MAX_CHARACTERS], second)
        best = max(best, 1.0 - distance / length if length else 0.0)
    return best if best >= 0.5 else 0.0


def word_recognition(text: str, answers: Sequence[str]) -> float:
    """1 where the letters a–z and digits are an answer's, in order; nothing else counts.

    The rule of IIIT5K and of ICDAR 2015's "accuracy without case and symbols".

    >>> word_recognition("Coffee-Shop!", ["COFFEE SHOP"])
    1.0
    """
    return float(_alphanumeric(text) in {_alphanumeric(answer) for answer in answers})


def error_rate(texts: Sequence[str], golds: Sequence[str], words: bool = False) -> float:
    """Character or word error rate of a whole set: (S + D + I) / N, summed before dividing.

    It may exceed 1. A word is what white space separates, so it means nothing for Chinese.

    Raises:
        ValueError: the gold texts hold nothing to divide by.

    >>> error_rate(["ab", "c"], ["ax", "cdef"])
    0.6666666666666666
    """
    pairs = [(t.split(), g.split()) if words else (t, g) for t, g in zip(texts, golds, strict=True)]
    length = sum(len(gold) for _, gold in pairs)
    if not length:
        raise ValueError("the gold texts are empty: there is no error rate")
    return sum(Levenshtein.distance(text[:MAX_CHARACTERS], gold) for text, gold in pairs) / length


def _in_or_near(text: str, answer: str, separator: str | None, short: int) -> float:
    """1 for a short answer that is a part of the text; a long one by ANLS of at least 0.5."""
    if len(answer.split(separator)) < short:
        return float(answer in text)
    longest = max(len(text), len(answer))
    similarity = 1.0 - Levenshtein.distance(text[:MAX_CHARACTERS], answer) / longest
    return similarity if similarity >= 0.5 else 0.0


def _counted(text: str, answer: str, rule: str | None) -> float:
    """A part of the text, or 1 − relative error where that is above 0.5, by the rule."""
    if rule == "exact match":
        return float(_one_line(answer.lower()) in text)
    number = re.search(r"\d+", text)
    if number is None or (count := int(number[0][:18])) == 0:
        return 0.0
    similarity = 1.0 - abs(count - int(answer)) / int(answer)
    return similarity if similarity > 0.5 else 0.0


def _one_line(text: str) -> str:
    return text.strip().replace("\n", " ")


def _dense(text: str) -> str:
    return _one_line(text).replace(" ", "")


def _without_text_tags(formula: str) -> str:
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", formula)


def _alphanumeric(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = frozenset(("a", "an", "the"))
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten"
_NUMBERS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS.split())} | {"none": "0"}
_ONE_APOSTROPHE = (
    "ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's "
    "how'd how'll how's isn't it'd it'll ma'am mightn't might've mustn't must've needn't not've "
    "o'clock oughtn't shan't should've shouldn't somebody'll somebody's someone'd someone'll "
    "someone's something'd something'll that's there'd there're there's they'd they'll they're "
    "they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's "
    "where've who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd "
    "you'll you're you've"
)
_TWO_APOSTROPHES = (
    "couldn't've hadn't've he'd've it'd've mightn't've she'd've shouldn't've somebody'd've "
    "someone'd've something'd've there'd've they'd've we'd've who'd've wouldn't've y'all'll "
    "you'd've"
)


def _contractions() -> dict[str, str]:
    """Misspelt contractions, of whose apostrophes one is missing, to right ones."""
    table = {word.replace("'", ""): word for word in _ONE_APOSTROPHE.split()}
    for word in _TWO_APOSTROPHES.split():
        first, second, third = word.split("'")
        table |= {f"{first}{second}'{third}": word, f"{first}'{second}{third}": word}
    return table | {"somebody'd": "somebodyd"}  # the server's own table turns this one round


_CONTRACTIONS = _contractions()
