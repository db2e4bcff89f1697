"""Spatial: relations, directions, and estimates of distances, sizes and numbers."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.parsing import parse_integer
from vlm_grpo.task.sentences import NUMBER_WORDS, Candidate, choose, fold
from vlm_grpo.tasks.choice import Choice
from vlm_grpo.tasks.graders.subjects import is_about
from vlm_grpo.tasks.numeric import clean, parse_quantity
from vlm_grpo.types import Example

_LONGEST = 300  # characters of an estimate
# Sizes in meters and square meters; units as ``parse_quantity`` returns them, in the singular.
_METERS = {
    **{"mm": 1e-3, "cm": 1e-2, "dm": 0.1, "m": 1.0, "km": 1e3},
    **dict.fromkeys(("in", "inch", "inche"), 0.0254),
    **dict.fromkeys(("ft", "foot", "feet"), 0.3048),
    **dict.fromkeys(("yd", "yard"), 0.9144),
}
_SQUARE_METERS = {f"{unit}²": size * size for unit, size in _METERS.items()}
_NAMES = (
    r"(?:square |sq\.? )?(?:milli|centi|deci|kilo)?met(?:er|re)s?"
    r"|(?:square )?(?:inch(?:es)?|f(?:oo|ee)t|yards?)|[mcdk]?m(?:²|\^2)?|ft|in|yd"
)
_ASKED = re.compile(rf"\bin ({_NAMES})\b", re.IGNORECASE)
_ESTIMATE = re.compile(
    rf"(?<![\w.,])-?\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?(?: ?(?:{_NAMES}))?(?![\w²^%])"
    rf"|(?<![\w.,])-?\d+(?:\.\d+)?(?: ?(?:{_NAMES}))?(?![\w²^%]|[.,]\d)",
    re.IGNORECASE,
)
# How units and numbers before them are written besides.
_AREA = re.compile(
    r"(?<=[\d ])(?:sq\.? ?([mcdk]?m|met(?:er|re)s?|ft|f(?:oo|ee)t|in|yd)|([mcdk]?m|ft|in|yd)2)\b",
    re.IGNORECASE,
)
_WORD = re.compile(rf"\b({'|'.join(NUMBER_WORDS)})(?= (?:{_NAMES})\b)", re.IGNORECASE)
_COMMA = re.compile(rf"(?<![\w.,])(\d+),(\d{{1,2}})(?= ?(?:{_NAMES})\b)", re.IGNORECASE)  # 2,5 m
_HAN_UNITS = {"米": "m", "厘米": "cm", "毫米": "mm", "千米": "km", "公里": "km"}
_HAN = re.compile(r"(?<=\d) ?(平方)?(厘米|毫米|千米|公里|米)(?:左右)?")
# Bounds, a part of what is counted, and what others say.
_NO_ESTIMATE = re.compile(
    r"\bat (?:the )?(?:very )?(?:least|most)\b|\bup to\b|\bexceed|\bwithin\b|[<>≤≥±]"
    rf"|\d ?(?:{_NAMES})? ?(?:\bto\b|\band\b|[-–—]) ?\d"
    r"|至[少多]|最[多少]|超过|不到|以[上下内]"
    r"|\d (?:out )?of (?:the|them|these|those|which)\b"
    r"|\b(?:friend|people|some(?:one|body)|others?|he|she|they)\b[^.;:,]{0,40}\bsa(?:ys?|id)\b",
    re.IGNORECASE,
)
_SIZE = re.compile(r"\d(?: ?\w+)? (?:high|tall|wide|thick|deep)\b", re.IGNORECASE)
_GAP = re.compile(r"\b(?:distance|how far|apart|between)\b", re.IGNORECASE)
_FROM = re.compile(r"\d[^.;]*? from (?:the |an? )?([^.;]*)", re.IGNORECASE)
# What an answer may name though the question does not.
_VIEWER = {
    *("camera", "observer", "viewer", "you", "me", "it", "here", "each", "one", "center", "centre"),
    *("image", "picture", "photo", "scene", "frame", "video", "room"),
}
_PLACED = re.compile(
    r"(?:(?:the |an? )?([\w ]{1,40}?) (?:is|are) )?(?:\w+ )?(?:(?:to|on|at|in) )?(?:the )?"
    r"[\w-]{1,20}(?: side)? of (?:the |an? )?([\w ]{1,40}?)\W*",
    re.IGNORECASE,
)
_ASKED_OF = re.compile(
    r"\b(?:is|are) (?:the |an? )?([\w ]+?)(?:,|\?| (?:to|from|in|at|on|seen)\b|\Z)"
)
_LEVELS = np.linspace(0.5, 0.95, 10)  # VSI-Bench's thresholds


class Spatial(Task):
    """Answer a question about a scene: one of several options, or an estimate.

    The gold answer is that of ``choice``, ``{"options": […], "answer": …}``, or a number, perhaps
    as a text with a unit ("1.2 m"). Lengths and areas are converted; a number without a unit has
    that of the gold answer, or that which the question asks for ("in centimeters").

    Attributes:
        grade: reward of an estimate: "mra", VSI-Bench's mean relative accuracy; "error": 1 − the
            relative error, at least 0.
        shuffle: show the options in an order of each example's own, as in choice.
    """

    primary_metric = "right"
    instruction: str | None = "Answer with the letter of the right option or with a number alone."
    grade: Literal["mra", "error"] = "mra"
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grade not in ("mra", "error"):
            raise ValueError(f"grade is {self.grade!r}; it must be mra or error")

    @property
    def _choice(self) -> Choice:
        return Choice(shuffle=self.shuffle)

    def question(self, example: Example) -> str:
        return self._choice.question(example) if _has_options(example) else example.question

    def parse(self, text: str, example: Example) -> int | str | None:
        """Return the number of the chosen option in the row, or a quantity as text."""
        if _has_options(example):
            is_other = _is_about_other(text, example.question)
            return None if is_other else self._choice.parse(text, example)
        if len(text) > _LONGEST:
            return None
        text = _WORD.sub(lambda word: str(NUMBER_WORDS[word[0].lower()]), text)
        if not re.search(r"\d", text) and re.search(r"(?i)\bhow many\b", example.question):
            number = parse_integer(re.sub(r"(?i)\b(?:about|around|approximately) ", "", text))
            is_own = is_about(text, example.question, counts=True)
            return None if number is None or not is_own else str(number)
        text = _write_areas(
            _HAN.sub(lambda unit: f" {_HAN_UNITS[unit[2]]}{'²' * bool(unit[1])}", text)
        )
        text = _COMMA.sub(r"\1.\2", re.sub(r"(?<=[一-鿿])(?=\d)", " ", text))
        text = re.sub(r"(?<=\w) (?:apart|away)(?=\W*\Z)", "", text)
        if not _GAP.search(example.question):
            text = re.sub(r"(?<=\w) (?:high|tall|wide|thick|deep|long)(?=\W*\Z)", "", text)
        if parse_quantity(text) is not None:
            return clean(text)
        text = _write_areas(" ".join(fold(text).replace("−", "-").split()))
        if re.search(r"\d", _ESTIMATE.sub("", text)) or _NO_ESTIMATE.search(text):
            return None
        if _is_of_other(text, example.question):
            return None
        places = [*_ESTIMATE.finditer(text)]
        texts = [re.sub(r"(?<=\d)(?=[a-zA-Z])", " ", place[0]) for place in places]
        if _are_equal(texts):
            texts = texts[:1] * len(texts)
        found = [Candidate(*p.span(), own) for p, own in zip(places, texts, strict=True)]
        answer = choose(text, found) or ""
        return answer if parse_quantity(answer) is not None else None

    def write(self, answer: int | str, example: Example) -> str:
        return answer if isinstance(answer, str) else self._choice.write(answer, example)

    def gold_answer(self, example: Example) -> int | str:
        if _has_options(example):
            return self._choice.gold_answer(example)
        gold = example.answer
        return gold if isinstance(gold, str) else repr(gold)

    def check(self, example: Example) -> None:
        if _has_options(example):
            self._choice.check(example)
            return
        gold = example.answer
        is_number = isinstance(gold, int | float) and not isinstance(gold, bool)
        found = parse_quantity(gold if isinstance(gold, str) else repr(gold))
        if not (is_number or isinstance(gold, str)) or found is None:
            raise ValueError(
                f"the answer {gold!r:.80} must have options, or be a number, perhaps with a unit"
            )
        if found.value <= 0:
            raise ValueError(f"the answer {gold!r} must be positive: errors are relative to it")

    @reward(weight=1.0)
    def right(self, answer: int | str, example: Example) -> float:
        """1 for the right option, else 0; of an estimate, its ``grade``."""
        if isinstance(answer, int):
            return float(answer == self.gold_answer(example))
        error = self._error(answer, example)
        return max(0.0, 1.0 - error) if self.grade == "error" else _compute_mra(error)

    @metric()
    def mra(self, answer: int | str, example: Example) -> float:
        """VSI-Bench's mean relative accuracy (arXiv:2412.14171, section 3.3): the share of the
        thresholds θ of 0.5, 0.55, …, 0.95 with |answer − gold| / gold ≤ 1 − θ, as in its script; of
        an option, 1 or 0."""
        if isinstance(answer, int):
            return float(answer == self.gold_answer(example))
        return _compute_mra(self._error(answer, example))

    def _error(self, answer: str, example: Example) -> float:
        """Return the relative error; infinite if the units do not fit."""
        gold = self.gold_answer(example)
        right, found = parse_quantity(str(gold)), parse_quantity(answer)
        if right is None or found is None:
            return math.inf
        asked = _ASKED.search(example.question)
        unit = right.unit or (_read_unit(asked[1]) if asked else "")
        values = _convert(right.value, unit), _convert(found.value, found.unit or unit)
        if found.unit and found.unit != unit and None in values:
            # "3 chairs" to "How many chairs are there?"
            thing = rf"\b{re.escape(found.unit)}(?:e?s)?\b"
            if unit or not re.search(thing, example.question, re.IGNORECASE):
                return math.inf
            values = None, None
        first, second = values
        if first is None or second is None:
            return abs(found.value - right.value) / right.value
        if first[1] != second[1]:  # a length is no area
            return math.inf
        if (found.unit or unit) == unit:  # without the rounding of a conversion
            return abs(found.value - right.value) / right.value
        return abs(second[0] - first[0]) / first[0]

    def corpus_metrics(
        self, answers: Sequence[int | str | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Return ``category_mean``, the mean of ``mra`` over the kinds of questions by
        ``meta["type"]``, each the mean over its ``meta["level"]``, as VSI-Bench's overall score."""
        groups: dict[Any, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
        for answer, example in zip(answers, examples, strict=True):
            own = groups[example.meta.get("type")][example.meta.get("level")]
            own.append(0.0 if answer is None else self.mra(answer, example))
        means = [np.mean([np.mean(v) for v in levels.values()]) for levels in groups.values()]
        return {"category_mean": float(np.mean(means))} if means else {}


def _has_options(example: Example) -> bool:
    return isinstance(example.answer, Mapping)


def _write_areas(text: str) -> str:
    """Return a text with the sign of a power in "sqm", "sq. feet" and "m2"."""
    return _AREA.sub(lambda unit: f"{_read_unit(unit[1] or unit[2])}²", text)


def _is_of_other(text: str, question: str) -> bool:
    """Return whether an estimate is another quantity than the question's: a height where a distance
    is asked for, or a distance from what the question does not name."""
    if _GAP.search(question) and _SIZE.search(text):
        return True
    place = _FROM.search(text)
    words = {*re.findall(r"\w+", place[1].lower())} if place else set()
    return bool(words) and words.isdisjoint({*re.findall(r"\w+", question.lower())} | _VIEWER)


def _is_about_other(text: str, question: str) -> bool:
    """Return whether a sentence places what the question does not ask for ("The table is left of
    the chair", where the chair is), or beside what it does not name."""
    placed, asked = _PLACED.fullmatch(text.strip()), _ASKED_OF.search(question.lower())
    if asked is None or placed is None:
        return False
    first, second = (placed[1] or "").lower(), placed[2].lower()
    known = {*re.findall(r"\w+", question.lower())} | _VIEWER
    return known.isdisjoint(second.split()) or (second == asked[1] and first != asked[1])


def _are_equal(texts: Sequence[str]) -> bool:
    """Return whether estimates are one length or area in several units, up to rounding."""
    found = [quantity for quantity in map(parse_quantity, texts) if quantity is not None]
    values = [size for q in found if (size := _convert(q.value, q.unit)) is not None]
    if not len(values) == len(texts) == len({quantity.unit for quantity in found}):
        return False
    return all(
        size[1] == values[0][1] and math.isclose(size[0], values[0][0], rel_tol=0.02)
        for size in values
    )


def _compute_mra(error: float) -> float:
    return float(np.mean(error <= 1 - _LEVELS))


def _read_unit(name: str) -> str:
    found = parse_quantity(f"1 {name}")
    return "" if found is None else found.unit


def _convert(value: float, unit: str) -> tuple[float, str] | None:
    """Return a length in meters or an area in square meters, with its dimension."""
    if unit in _METERS:
        return value * _METERS[unit], "length"
    return (value * _SQUARE_METERS[unit], "area") if unit in _SQUARE_METERS else None
