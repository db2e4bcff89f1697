"""Numeric: questions on charts and figures whose answer is a number or a short text."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any, NamedTuple

from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.parsing import parse_integer
from vlm_grpo.task.sentences import has_number, is_sure, unwrap
from vlm_grpo.types import Example

_LONGEST = 200  # Maximum number of characters of an answer
_NUMBER = re.compile(
    r"(?P<sign>(?:[-+] ?)?)(?P<currency>US\$|[$€£¥₹]|(?:USD|EUR|GBP|JPY|INR) )?(?P<inner>-?)"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
    r"(?:[eE](?P<e>[-+]?\d{1,3})"
    r"|(?: ?(?:[×x*·]|\\times|\\cdot) ?10 ?(?:\^|\*\*) ?\{?(?P<power>[-+]?\d{1,3})\}?))?"
    r"(?P<unit>(?:[^\d ]| [^\d ])*)"
)
_SCALES = (
    (2, re.compile(r"(?i:hundreds?)")),
    (3, re.compile(r"[kK]|(?i:thousands?)")),
    (5, re.compile(r"(?i:la(?:kh|c)s?)")),
    (6, re.compile(r"M|(?i:mn|mln|millions?)")),
    (7, re.compile(r"(?i:crores?)")),
    (9, re.compile(r"B|(?i:bn|billions?)")),
    (12, re.compile(r"T|(?i:tn|trillions?)")),
)
_MONEY = {"m": 6, "b": 9, "t": 12}
"""Scales in lower case, which mean other units without a currency: "$5m" but "5 m"."""
_SIGNS = (
    ("$", re.compile(r"us\$|usd|dollars?")),
    ("€", re.compile(r"eur|euros?")),
    ("£", re.compile(r"gbp|pounds?")),
    ("¥", re.compile(r"jpy|yen")),
    ("₹", re.compile(r"inr|rupees?")),
    ("%", re.compile(r"percent|pct")),
    ("°", re.compile(r"deg|degrees?")),
    ("°c", re.compile(r"(?:degrees? )?celsius")),
    ("°f", re.compile(r"(?:degrees? )?fahrenheit")),
    ("mm", re.compile(r"millimet(?:er|re)s?")),
    ("cm", re.compile(r"centimet(?:er|re)s?")),
    ("km", re.compile(r"kilomet(?:er|re)s?")),
    ("m", re.compile(r"met(?:er|re)s?")),
    ("kg", re.compile(r"kgs|kilos?|kilograms?")),
    ("g", re.compile(r"grams?")),
    ("s", re.compile(r"s|secs?|seconds?")),
    ("min", re.compile(r"mins?|minutes?")),
    ("h", re.compile(r"hrs?|hours?")),
)
_ATTACHED = re.compile(r"[%°$€£¥₹]|°[CF]|[kcm]m|m?[lL]|m?g|kg|[kMGT]Wh?|[KMGT]B|percent")
"""Units that may follow a number without a space; others would make "4G" and "1st" numbers."""
_UNIT = re.compile(r"(?:[^\W\d_]|°)[^\W\d_]*[²³]?(?:[/ ][^\W\d_]+[²³]?)?")
_POWER = re.compile(r"(?<=[a-zA-Z])\^\{?([23])\}?")
# LaTeX's forms of what a number and its unit are written with.
_LATEX = (
    (re.compile(r"\\(?:text|mathrm|mbox) ?\{([^{}]*)\}"), r"\1"),
    (re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degree)"), "°"),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\\[ ,;!]"), " "),
)
# What may be counted where the gold answer has no unit, besides the units and the question's words.
_COUNTED = re.compile(
    "people|person|country|student|year|month|week|day|item|unit|point|time|vote|case|inch|foot|ft"
    "|mile|mph|litre|liter|l|ml|lb|oz|ton|tonne|w|wh|gw|gwh|mw|mwh|tw|twh|kw|kwh|kb|mb|gb|tb|hz|cm"
    "|v|k|n|j|pa|per"
)


class Quantity(NamedTuple):
    """A number with its unit, a currency's sign, "%" or a text; empty: none."""

    value: float
    unit: str


class Numeric(Task):
    """Read a number off a figure, or a short text; the gold answer is either, or a list of such.

    An answer is compared as a number if the gold answer is one: with thousands separators, an
    exponent, a scale (k, M, million, bn), a currency and a unit, or as one English word. A percent
    sign is a unit: 43 % is 43, never 0.43. Other gold answers are texts, which must be equal up to
    case, white space, quotes and a final period.

    Attributes:
        tolerance: largest relative error of a right number, by default ChartQA's
            (arXiv:2203.10244, section 5.1); 0: the number must be equal.
        exact_years: an integer gold answer from 1900 to 2099 without a unit must be met exactly,
            because 5 % of a year is a century.
        units: an answer must have the unit of the gold answer; otherwise it may leave it out, but
            never have another one.
    """

    primary_metric = "relaxed"
    instruction: str | None = "Answer with the number or the words alone."
    tolerance: float = 0.05
    exact_years: bool = True
    units: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; it must be from 0 to less than 1")

    def parse(self, text: str, example: Example) -> str | None:
        return clean(text)

    def write(self, answer: str, example: Example) -> str:
        return answer

    def gold_answer(self, example: Example) -> str:
        return _list_golds(example.answer)[0]

    def check(self, example: Example) -> None:
        golds = _list_golds(example.answer)
        if not golds:
            raise ValueError("the answer must be a number, a string, or a list of accepted ones")
        for gold in golds:
            if clean(gold) is None:
                raise ValueError(f"the answer {gold!r:.80} must be 1 to {_LONGEST} characters")

    @reward(weight=1.0)
    def relaxed(self, answer: str, example: Example) -> float:
        """1 if the relative error is at most ``tolerance``, or the text is equal, else 0."""
        return float(self._error(answer, example) <= self.tolerance)

    @reward(weight=0.0)
    def closeness(self, answer: str, example: Example) -> float:
        """1 − |answer − gold| / |gold|, at least 0; 1 or 0 for texts and exact years."""
        return max(0.0, 1.0 - self._error(answer, example))

    @metric()
    def exact(self, answer: str, example: Example) -> float:
        """1 if the number or the text is equal, else 0."""
        return float(self._error(answer, example) == 0)

    def _error(self, answer: str, example: Example) -> float:
        """Return the relative error to the nearest gold answer; infinite for another text."""
        return min(self._compare(answer, gold, example) for gold in _list_golds(example.answer))

    def _compare(self, answer: str, gold: str, example: Example) -> float:
        right, found = parse_quantity(gold), parse_quantity(answer)
        if right is None:
            return 0.0 if fold(answer) == fold(gold) else math.inf
        if found is None or not self._fits(found.unit, right.unit, example.question):
            return math.inf
        if found.value == right.value:
            return 0.0
        is_year = re.fullmatch(r"(?:19|20)\d\d", gold.strip())
        if not right.value or (self.exact_years and is_year):
            return math.inf
        return abs(found.value - right.value) / abs(right.value)

    def _fits(self, unit: str, gold: str, question: str) -> bool:
        if unit == gold or not unit:
            return unit == gold or not self.units
        known = set(map(_normalize_unit, re.findall(r"[^\W\d_]+", question)))
        known |= {sign for sign, _ in _SIGNS}
        parts = map(_normalize_unit, re.split(r"[/ ²³]+", unit))
        return not gold and all(p in known or _COUNTED.fullmatch(p) for p in parts if p)


def _list_golds(answer: Any) -> list[str]:
    answers = answer if isinstance(answer, list | tuple) else [answer]
    return [text for item in answers if (text := _to_text(item)) is not None]


def _to_text(answer: Any) -> str | None:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return repr(answer) if math.isfinite(answer) else None
    return answer if isinstance(answer, str) else None


def clean(text: str) -> str | None:
    """Return a short text without what models write around an answer; None if nothing is left."""
    text = unwrap(unicodedata.normalize("NFC", text).replace("−", "-"))
    for pattern, written in _LATEX:
        text = pattern.sub(written, text)
    text = " ".join(text.split()).removesuffix(".").strip()
    return text if 0 < len(text) <= _LONGEST else None


def fold(text: str) -> str:
    """Return a text without the differences that do not matter."""
    return re.sub(r"(?<=\d) ?[‐‑–—] ?(?=\d)", "-", (clean(text) or "").casefold())


def parse_quantity(text: str) -> Quantity | None:
    """Return the number that a text consists of, with its unit; None if it is anything else.

    >>> parse_quantity("$1.2 million"), parse_quantity("-3,400 km/h"), parse_quantity("5 or 6")
    (Quantity(value=1200000.0, unit='$'), Quantity(value=-3400.0, unit='km/h'), None)
    """
    text = _POWER.sub(lambda power: "²³"[int(power[1]) - 2], clean(text) or "")
    found = _NUMBER.fullmatch(text)
    if found is None:
        word = None if " " in text or re.search(r"\d", text) else parse_integer(text)
        return None if word is None else Quantity(float(word), "")
    currency = _normalize_unit((found["currency"] or "").strip())
    first, _, rest = found["unit"].strip().partition(" ")
    scale = next((power for power, words in _SCALES if words.fullmatch(first)), 0)
    scale = scale or (_MONEY.get(first, 0) if currency else 0)
    unit = f" {rest}".rstrip() if scale else found["unit"]
    power = int(found["e"] or found["power"] or 0) + scale
    value = float(f"{re.sub('[, ]', '', found['digits'])}e{power}")
    name = _read_unit(unit, currency)
    if name is None or not math.isfinite(value) or (found["sign"] and found["inner"]):
        return None
    return Quantity(-value if "-" in found["sign"] + found["inner"] else value, name)


def _read_unit(text: str, currency: str) -> str | None:
    """Return the unit after a number; None if the text is no unit, or there are two."""
    if not (unit := text.strip()):
        return currency
    words = re.sub("[/²³]", " ", unit)
    is_word = text.startswith(" ") and _UNIT.fullmatch(unit) and is_sure(f"|{words}", exact=True)
    if has_number(words) or not (is_word or _ATTACHED.fullmatch(unit)):
        return None
    unit = _normalize_unit(unit)
    return unit if currency in ("", unit) else None


def _normalize_unit(unit: str) -> str:
    """Return a unit's sign, or its name in the singular, with its power."""
    power = unit[-1:] if unit.endswith(("²", "³")) else ""
    unit = unit.lower().removesuffix(power)
    if unit.startswith("square "):
        unit, power = unit.removeprefix("square "), "²"
    sign = next((sign for sign, words in _SIGNS if words.fullmatch(unit)), None)
    return (sign or unit.removesuffix("s")) + power
