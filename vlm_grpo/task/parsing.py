"""Parsers of model output for training, evaluation and offline scoring.

Each returns a value or None. None of them raises or evaluates text, and all take linear time.
They accept honest variants of an answer (code fences, floats, number words) and reject answers
that offer a choice, because hedging must not pay.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# A box (xyxy, in the units that the model wrote) and its label or None.
LabeledBox = tuple[tuple[float, float, float, float], str | None]
Point = tuple[float, float]

MAX_CHARACTERS = 20_000  # of an answer: enough for a page of text or 300 boxes
MAX_COUNT_CHARACTERS = 1_000  # of an answer that contains one number
MAX_DIGITS = 18  # of a count
MAX_ITEMS = 500  # boxes or points in an answer
MAX_COORDINATE = 1e6  # no image is this wide, and areas of larger boxes overflow

_Rows = list[tuple[list[float], str | None]]
_BOX_KEYS = (("bbox_2d", "bbox", "box"), ("box_2d",))  # of x first and of y first
_POINT_KEYS = (("point_2d", "point"), ("point",))


def extract_answer(text: str, tags: bool) -> str | None:
    """Extract the answer from a completion and strip surrounding white space.

    With ``tags`` it is the content of the only ``<answer>…</answer>`` after any thinking, otherwise
    all text after any thinking; None if it is empty, if the thinking is unclosed or repeated, or if
    the tags are missing, unclosed or repeated. GLM-V's ``<|begin_of_box|>`` and
    ``<|end_of_box|>``, which mark its final answer of any kind, are removed if both occur once.

    >>> extract_answer("<think>4? no</think><answer> 3 </answer>", tags=True)
    '3'
    """
    opened, closed = text.count("<think>"), text.count("</think>")
    if opened > 1 or closed > 1 or opened > closed:
        return None
    if closed:
        # Some chat templates open the thinking in the prompt, so only its end is required.
        thought, text = text.split("</think>")
        if "<think>" in text or (opened and thought[: thought.index("<think>")].strip()):
            return None
    if tags:
        if text.count("<answer>") != 1 or text.count("</answer>") != 1:
            return None
        text, closed, _ = text.partition("<answer>")[2].partition("</answer>")
        if not closed:
            return None
    if text.count("<|begin_of_box|>") == text.count("<|end_of_box|>") == 1:
        text = text.replace("<|begin_of_box|>", " ").replace("<|end_of_box|>", " ")
    return text.strip() or None


_UNITS = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen"
    "|sixteen|seventeen|eighteen|nineteen"
)
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
NUMBER_WORDS = {word: number for number, word in enumerate(_UNITS.split("|"))} | {
    word: 10 * number for number, word in enumerate(_TENS.split("|"), start=2)
}
"""Zero to nineteen, and the tens up to ninety."""
_NUMBER = re.compile(
    r"(?<![^\W_])(\d{1,3}(?:,\d{3})+|\d+)(?:\.0+)?(?!\d)"
    rf"|\b(?:({_TENS})(?:[ -](one|two|three|four|five|six|seven|eight|nine))?|({_UNITS}))\b"
)
# Words that make a number a choice, a bound, a guess or a denial, and words that change its value.
_HEDGES = re.compile(
    r"\b(?:or|nor|not|cannot|none|never|neither|between|least|most|more|less|fewer|than"
    r"|approximately|approx|roughly|circa|nearly|almost|maybe|perhaps|possibly|probably|several"
    r"|minus|negative|plus|up to|point|dozens?|hundreds?|thousands?|millions?|billions?|percent)\b"
    r"|n['’]t\b"
)
_HEDGE_SIGNS = frozenset("<>~≈±≤≥+?%/^")
_NO_COUNT_BEFORE = re.compile(
    r"(?:\b(?:about|around|over|under|above|below|no) ?|[-‐‑‒–—−] ?|[.,])\Z"
)
_NO_COUNT_AFTER = re.compile(
    r"[a-z_]|[.,]\d|-[a-z]|[ -]*(?:and (?:a|one) )?(?:half|halves|thirds?|quarters?|pairs?)\b"
)
_LONGEST_BEFORE = len("around ") + 1
_STATED_ZERO = re.compile(r"\b(?:(there (?:are|were)) no(?= [a-z])|(there (?:is|was)) no one\b)")
_EXPLANATION = re.compile(r"[:([]")


def parse_integer(text: str) -> int | None:
    """Parse the number that an answer states as a non-negative integer.

    Numbers are digits of any script, with or without commas between thousands and a fraction of
    zeros, and the English words zero to ninety-nine, alone or in a phrase ("3 apples", "There are
    three."). "There are no apples" and "There is no one" state zero; no other text without a number
    does, because a refusal to answer must not earn anything.

    The rule for several numbers: all must be equal. Only what follows the first number after a
    colon or an opening bracket may instead add up to it ("3 dogs: one black and two white"). Hedges
    ("2 or 3", "at least 3"), and negative or fractional numbers give None.

    >>> parse_integer("1,234 apples"), parse_integer("Twenty-two (22)"), parse_integer("2 or 3")
    (1234, 22, None)
    """
    if len(text) > MAX_COUNT_CHARACTERS:
        return None
    # Normalization would turn ½, ² and ③ into plain digits.
    if any(unicodedata.category(character) in ("No", "Nl") for character in text):
        return None
    text = unicodedata.normalize("NFKC", text).lower()
    text = " ".join(re.sub(r"\b_+|_+\b", " ", text).split())  # Markdown's emphasis
    if not _HEDGE_SIGNS.isdisjoint(text) or _HEDGES.search(text):
        return None
    text = _STATED_ZERO.sub(r"\1\2 0", text)
    numbers = list(_NUMBER.finditer(text))
    # Digits outside the numbers belong to text such as "x3".
    values = [value for number in numbers if (value := _read_number(number)) is not None]
    if not values or len(values) < len(numbers) or re.search(r"\d", _NUMBER.sub("", text)):
        return None
    explanation = _EXPLANATION.search(text, numbers[0].end())
    end = len(text) if explanation is None else explanation.start()
    stated = [value for value, number in zip(values, numbers, strict=True) if number.start() < end]
    explained = values[len(stated) :]
    is_breakdown = sum(explained) == values[0] and set(stated) == {values[0]}
    return values[0] if len(set(values)) == 1 or is_breakdown else None


def _read_number(match: re.Match[str]) -> int | None:
    """Return the value of a number, or None if the text next to it makes it something else."""
    text, start, end = match.string, match.start(), match.end()
    before = text[max(0, start - _LONGEST_BEFORE) : start]
    if _NO_COUNT_BEFORE.search(before) or _NO_COUNT_AFTER.match(text, end):
        return None
    digits, *words = match.groups()
    if digits is None:
        return sum(NUMBER_WORDS[word] for word in words if word)
    digits = digits.replace(",", "")
    return int(digits) if len(digits) <= MAX_DIGITS else None


def parse_boxes(text: str, units: str = "", y_first: bool = False) -> list[LabeledBox] | None:
    """Parse all boxes in an answer.

    The accepted forms are JSON (an object with ``bbox_2d``, a list of four numbers, or a list of
    either), with or without a code fence or words around it, and with round brackets around four
    numbers; Qwen2-VL's ``<|box_start|>(x1,y1),(x2,y2)<|box_end|>``; InternVL's
    ``<box>[[x1,y1,x2,y2]]</box>``; GLM-V's ``<|begin_of_box|>…<|end_of_box|>`` around JSON; Gemma
    4's JSON with ``box_2d``; and PaliGemma's four ``<loc…>`` tokens in the order y1 x1 y2 x2.
    Words may stand before the tokens of the last three. ``[]`` means that there are none.

    The rule for everything else in the text: it must contain no number, which would be another
    answer, except those of ``units``; and JSON that is repeated must be equal each time.

    Args:
        text: the answer.
        units: the prompt's description of the units, whose numbers the answer may repeat
            ("in pixels of the 640x480 image").
        y_first: whether JSON has y before x, under ``box_2d``.

    Returns:
        Boxes as xyxy in the units that the model wrote, each with its label or None; None if any
        part of the answer is malformed or any box is inverted, empty, not finite or truncated.

    >>> parse_boxes('[{"bbox_2d": [1, 2, 3, 4.5], "label": "cat"}]')
    [((1.0, 2.0, 3.0, 4.5), 'cat')]
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = " ".join(text.split())  # single spaces keep the patterns linear
    for marker, pattern, read in _TOKEN_GRAMMARS:
        if (start := marker.search(text)) is not None:
            words, tokens = text[: start.start()], text[start.start() :]
            matches = None if _has_number(words, units) else _scan(pattern, tokens)
            return _join(read(match) for match in matches) if matches else None
    return _parse_json_boxes(_ROUND_BOX.sub(r"[\1]", text), units, y_first)


def parse_points(text: str, units: str = "", y_first: bool = False) -> list[Point] | None:
    """Parse all points (x, y) in an answer, in the model's units; None if any part is malformed.

    The accepted forms are JSON (an object with ``point_2d``, a list of two numbers, or a list of
    either) and (x, y), also in Qwen2-VL's box tokens; the rest is as for ``parse_boxes``.

    >>> parse_points('[{"point_2d": [10, 20.5]}, [3, 4]]')
    [(10.0, 20.5), (3.0, 4.0)]
    """
    text = _ROUND_POINT.sub(r"[\1]", " ".join(text.split()))  # as in parse_boxes
    rows = _parse_json_rows(text, _POINT_KEYS[y_first], units, y_first)
    if rows is None or not all(len(row) == 2 and _in_range(row) for row, _ in rows):
        return None
    return [(row[0], row[1]) for row, _ in rows]


def _parse_json_boxes(text: str, units: str = "", y_first: bool = False) -> list[LabeledBox] | None:
    rows = _parse_json_rows(text, _BOX_KEYS[y_first], units, y_first)
    return None if rows is None else _join(_make_box(row, label) for row, label in rows)


def _join(boxes: Iterable[LabeledBox | list[LabeledBox] | None]) -> list[LabeledBox] | None:
    """Return boxes and lists of boxes as one list; None if one is None or there are too many."""
    joined: list[LabeledBox] = []
    for box in boxes:
        if box is None:
            return None
        joined += box if isinstance(box, list) else [box]
    return joined if len(joined) <= MAX_ITEMS else None


def _has_number(words: str, units: str) -> bool:
    """Return whether the text around an answer has a number that ``units`` does not have."""
    words = re.sub(r" ?[x×] ?(?=\d)", "x", words)
    for phrase in re.findall(r"\d+[x-]\d+", units):
        words = re.sub(rf"(?<!\d){phrase}(?!\d)", "", words)
    return any(map(str.isdecimal, words))


def _parse_json_rows(text: str, keys: Sequence[str], units: str, y_first: bool) -> _Rows | None:
    """Return the lists of numbers, x first, with labels, that the JSON in an answer states."""
    if len(text) > MAX_CHARACTERS:
        return None
    values, words = find_json(text)
    if _has_number(words, units) or (len(values) > 1 and re.search(r"\bor\b", words)):
        return None
    statements = [rows for v in values if (rows := _parse_json_value(v, keys)) is not None]
    rows = _merge(statements) if len(statements) == len(values) else None
    if rows is None or not y_first:
        return rows
    return [([*row[1::-1], *row[:1:-1]], label) for row, label in rows]


def _merge(statements: Sequence[_Rows]) -> _Rows | None:
    """Return what all statements agree on, or None; one of them may leave out the labels."""
    if not statements or any(
        [numbers for numbers, _ in rows] != [numbers for numbers, _ in statements[0]]
        for rows in statements
    ):
        return None
    labels = {tuple(label for _, label in rows) for rows in statements}
    labels = {found for found in labels if any(found)} or labels
    numbers = [numbers for numbers, _ in statements[0]]
    return list(zip(numbers, labels.pop(), strict=True)) if len(labels) == 1 else None


def _parse_json_value(value: Any, keys: Sequence[str]) -> _Rows | None:
    if isinstance(value, dict) or (isinstance(value, list) and _are_numbers(*value[:1])):
        value = [value]
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        return None
    rows = [row for item in value if (row := _parse_json_row(item, keys)) is not None]
    return rows if len(rows) == len(value) else None


def _parse_json_row(item: Any, keys: Sequence[str]) -> tuple[list[float], str | None] | None:
    label = None
    if isinstance(item, dict):
        present = [key for key in keys if key in item]
        label = item.get("label")
        if len(present) != 1 or not (label is None or isinstance(label, str)):
            return None
        item = item[present[0]]
    if not isinstance(item, list) or len(item) > 4 or not _are_numbers(*item):
        return None
    return item, label


def find_json(text: str) -> tuple[list[Any], str]:
    """Return the JSON lists and objects in a text, and the text outside them.

    There are no values if one is malformed or there are more than ``MAX_ITEMS``.
    """
    if '"' not in text:
        text = text.replace("'", '"')  # Python's quotes
    values, words, position = [], [], 0
    while (start := _JSON_START.search(text, position)) is not None:
        words.append(text[position : start.start()])
        if len(values) == MAX_ITEMS:
            return [], text
        try:
            value, position = _JSON.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            return [], text
        values.append(value)
    return values, " ".join([*words, text[position:]])


def _reject_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):  # a repeated key gives two answers
        raise ValueError("a key is repeated")
    return value


_JSON_START = re.compile(r"[\[{]")
_JSON = json.JSONDecoder(
    # As a float, a number of 10,000 digits is infinite; as an int it is an error.
    parse_int=float,
    parse_constant=_reject_constant,
    object_pairs_hook=_unique_keys,
)


def _are_numbers(*values: Any) -> bool:
    """Return whether there are values and all are JSON numbers, which booleans are not."""
    return bool(values) and all(isinstance(value, float) for value in values)


_N = r"(-?\d{1,9}(?:\.\d{0,9})?)"
_POINT_TOKEN = rf"\( ?{_N} ?, ?{_N} ?\)"
_ROUND_BOX = re.compile(rf"\(( ?{_N} ?, ?{_N} ?, ?{_N} ?, ?{_N} ?)\)")
_ROUND_POINT = re.compile(rf"(?:<\|box_start\|> ?)?\(( ?{_N} ?, ?{_N} ?)\)(?: ?<\|box_end\|>)?")
_TOKEN_BOX = re.compile(
    r"(?:<\|object_ref_start\|>([^<]*)<\|object_ref_end\|>)? ?(<\|box_start\|>)? ?"
    rf"{_POINT_TOKEN} ?, ?{_POINT_TOKEN} ?(<\|box_end\|>)? ?[,;.]? ?"
)
_TOKEN_START = re.compile(rf"<\|(?:object_ref|box)_start\|>|{_POINT_TOKEN} ?, ?\(")
_TAGGED_BOXES = re.compile(r"(?:<ref>([^<]*)</ref>)? ?<box>([^<]*)</box> ?[,;.]? ?")
_LOC_BOX = re.compile(r"<loc(\d{4})> ?<loc(\d{4})> ?<loc(\d{4})> ?<loc(\d{4})> ?([^<;]*)(?:; ?|\Z)")


def _scan(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
    """Return consecutive matches that cover the full text, or None."""
    matches, position = [], 0
    while position < len(text):
        match = pattern.match(text, position)
        if match is None or len(matches) == MAX_ITEMS:
            return None
        matches.append(match)
        position = match.end()
    return matches


def _read_token_box(match: re.Match[str]) -> LabeledBox | None:
    label, opened, *numbers, closed = match.groups()
    return _make_box(numbers, label) if bool(opened) == bool(closed) else None


def _read_tagged_boxes(match: re.Match[str]) -> list[LabeledBox] | None:
    inner = _parse_json_boxes(match[2])
    return None if inner is None else [(box, match[1]) for box, _ in inner]


def _read_loc_box(match: re.Match[str]) -> LabeledBox | None:
    y1, x1, y2, x2, label = match.groups()
    return _make_box((x1, y1, x2, y2), label.strip() or None)


_Reader = Callable[[re.Match[str]], LabeledBox | list[LabeledBox] | None]
# By the text that begins a box: the pattern of a box, and its reader.
_TOKEN_GRAMMARS: tuple[tuple[re.Pattern[str], re.Pattern[str], _Reader], ...] = (
    (re.compile("<loc"), _LOC_BOX, _read_loc_box),
    (re.compile("<ref>|<box>"), _TAGGED_BOXES, _read_tagged_boxes),
    (_TOKEN_START, _TOKEN_BOX, _read_token_box),
)


def _make_box(numbers: Sequence[str | float], label: str | None) -> LabeledBox | None:
    if len(numbers) != 4:
        return None
    x1, y1, x2, y2 = box = tuple(map(float, numbers))
    if not (_in_range(box) and x1 < x2 and y1 < y2):
        return None
    return (x1, y1, x2, y2), label


def _in_range(numbers: Sequence[float]) -> bool:
    return all(math.isfinite(number) and abs(number) <= MAX_COORDINATE for number in numbers)
