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
from collections.abc import Sequence
from typing import Any

LabeledBox = tuple[tuple[float, float, float, float], str | None]
"""A box (xyxy, in the units that the model wrote) and its label or None."""

MAX_CHARACTERS = 20_000
"""Maximum length of an answer: enough for a page of text or 300 boxes."""
MAX_COUNT_CHARACTERS = 1_000
"""Maximum length of an answer that contains one number."""
MAX_ITEMS = 500
"""Maximum number of boxes or points in an answer."""
MAX_COORDINATE = 1e6
"""Largest coordinate: no image is this wide, and areas of larger boxes overflow."""

_BOX_KEYS = ("bbox_2d", "bbox", "box")
_POINT_KEYS = ("point_2d", "point")


def extract_answer(text: str, tags: bool) -> str | None:
    """Extract the answer from a completion and strip surrounding white space.

    Args:
        text: the full completion.
        tags: if true, the answer is the content of the only ``<answer>…</answer>`` after any
            thinking; otherwise it is all text after any thinking.

    Returns:
        The answer; None if it is empty, if the thinking is unclosed or repeated, or if the tags
        are missing, unclosed or repeated.

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
        text = text.partition("<answer>")[2]
        if "</answer>" not in text:
            return None
        text = text.partition("</answer>")[0]
    return text.strip() or None


_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
)
_NUMBER_WORDS = {word: number for number, word in enumerate(_WORDS.split())}
_NUMBER = re.compile(
    r"(?<![^\W_])(?:\d{1,3}(?:,\d{3})+|\d+)(?![\d_])|\b(?:" + "|".join(_NUMBER_WORDS) + r")\b"
)
# Words that make a number a choice, a bound or a guess, and words that change its value.
_HEDGES = re.compile(
    r"\b(?:or|nor|not|never|neither|between|least|most|more|less|fewer|than|approximately|approx"
    r"|roughly|circa|nearly|almost|maybe|perhaps|possibly|probably|several|minus|negative|plus"
    r"|up to|point|dozens?|hundreds?|thousands?|millions?"
    r"|billions?|thirty|forty|fifty|sixty|seventy|eighty|ninety|percent)\b"
)
_HEDGE_BEFORE = re.compile(r"\b(?:about|around|over|under|above|below)\s*\Z")
_PART_AFTER = re.compile(r"[\s-]*(?:and\s+(?:a|one)\s+)?(?:half|halves|thirds?|quarters?|pairs?)\b")
_HEDGE_SIGNS = frozenset("<>~≈±≤≥+?%/^")
_MINUS_BEFORE = re.compile(r"[-‐‑‒–—−]\s*\Z")
_MAX_DIGITS = 18


def parse_integer(text: str) -> int | None:
    """Parse the only number in an answer as a non-negative integer.

    Numbers are digits of any script, with or without commas between thousands, and the English
    words zero to twenty, alone or in a phrase ("3 apples", "There are three.").

    Args:
        text: the answer.

    Returns:
        The integer; None for several numbers, hedges ("2 or 3", "at least 3"), and negative or
        fractional numbers.

    >>> parse_integer("1,234 apples"), parse_integer("twelve"), parse_integer("2 or 3")
    (1234, 12, None)
    """
    if len(text) > MAX_COUNT_CHARACTERS:
        return None
    # Normalization would turn ½, ² and ③ into plain digits.
    if any(unicodedata.category(character) in ("No", "Nl") for character in text):
        return None
    text = unicodedata.normalize("NFKC", text).lower()
    if not _HEDGE_SIGNS.isdisjoint(text) or _HEDGES.search(text):
        return None
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or sum(map(str.isdecimal, text)) > _MAX_DIGITS:
        return None
    number = numbers[0].group()
    before, after = text[: numbers[0].start()], text[numbers[0].end() :]
    # Digits that did not match belong to text such as "x3", "3.5", "1,23" or "3rd".
    if re.search(r"\d", before + after) or re.match(r"[a-z]|[.,]\d", after):
        return None
    if _PART_AFTER.match(after):
        return None
    if _MINUS_BEFORE.search(before) or _HEDGE_BEFORE.search(before) or before.endswith((".", ",")):
        return None
    return _NUMBER_WORDS[number] if number in _NUMBER_WORDS else int(number.replace(",", ""))


def parse_boxes(text: str) -> list[LabeledBox] | None:
    """Parse all boxes in an answer.

    The accepted forms are JSON (an object with ``bbox_2d``, a list of four numbers, or a list of
    either), with or without a code fence or words around it; Qwen2-VL's
    ``<|box_start|>(x1,y1),(x2,y2)<|box_end|>``; InternVL's ``<box>[[x1,y1,x2,y2]]</box>``; and
    PaliGemma's four ``<loc…>`` tokens in the order y1 x1 y2 x2. ``[]`` means that there are none.

    Args:
        text: the answer.

    Returns:
        Boxes as xyxy in the units that the model wrote, each with its label or None; None if any
        part of the answer is malformed or any box is inverted, empty, not finite or truncated.

    >>> parse_boxes('[{"bbox_2d": [1, 2, 3, 4.5], "label": "cat"}]')
    [((1.0, 2.0, 3.0, 4.5), 'cat')]
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = " ".join(text.split())  # single spaces keep the patterns linear
    if "<loc" in text:
        return _parse_loc_boxes(text)
    if "<box>" in text:
        return _parse_tagged_boxes(text)
    if "<|box_start|>" in text or text.startswith("("):
        return _parse_token_boxes(text)
    return _parse_json_boxes(text)


def parse_points(text: str) -> list[tuple[float, float]] | None:
    """Parse all points in an answer.

    The accepted form is JSON: an object with ``point_2d``, a list of two numbers, or a list of
    either.

    Args:
        text: the answer.

    Returns:
        Points (x, y) in the units that the model wrote; None if any part of the answer is
        malformed.

    >>> parse_points('[{"point_2d": [10, 20.5]}, [3, 4]]')
    [(10.0, 20.5), (3.0, 4.0)]
    """
    rows = _parse_json_rows(text, _POINT_KEYS)
    if rows is None or not all(len(row) == 2 and _in_range(row) for row, _ in rows):
        return None
    return [(row[0], row[1]) for row, _ in rows]


def _parse_json_boxes(text: str) -> list[LabeledBox] | None:
    rows = _parse_json_rows(text, _BOX_KEYS)
    boxes = None if rows is None else [_make_box(row, label) for row, label in rows]
    return None if boxes is None or None in boxes else boxes  # type: ignore[return-value]


def _parse_json_rows(text: str, keys: Sequence[str]) -> list[tuple[list[float], str | None]] | None:
    """Return the lists of numbers, with labels, in the answer's JSON value, or None."""
    if len(text) > MAX_CHARACTERS:
        return None
    starts = [position for mark in "[{" if (position := text.find(mark)) >= 0]
    end = max(text.rfind("]"), text.rfind("}")) + 1
    if not starts or end <= min(starts):
        return None
    start = min(starts)
    around = text[:start] + text[end:]
    if any(map(str.isdecimal, around)):  # a number outside the JSON is another answer
        return None
    value = _load_json(text[start:end])
    if isinstance(value, dict) or (isinstance(value, list) and _are_numbers(*value[:1])):
        value = [value]
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        return None
    rows = [_parse_json_row(item, keys) for item in value]
    return None if None in rows else rows  # type: ignore[return-value]


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


def _load_json(text: str) -> Any | None:
    if '"' not in text:
        text = text.replace("'", '"')  # Python's quotes
    try:
        # As a float, a number of 10,000 digits is infinite; as an int it is an error.
        return json.loads(
            text,
            parse_int=float,
            parse_constant=_reject_constant,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, RecursionError):
        return None


def _reject_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):  # a repeated key gives two answers
        raise ValueError("a key is repeated")
    return value


def _are_numbers(*values: Any) -> bool:
    """Return whether there are values and all are JSON numbers, which booleans are not."""
    return bool(values) and all(isinstance(value, float) for value in values)


_N = r"(-?\d{1,9}(?:\.\d{0,9})?)"
_TOKEN_BOX = re.compile(
    r"(?:<\|object_ref_start\|>([^<]*)<\|object_ref_end\|>)? ?(?:<\|box_start\|>)? ?"
    rf"\( ?{_N} ?, ?{_N} ?\) ?, ?\( ?{_N} ?, ?{_N} ?\) ?(?:<\|box_end\|>)? ?[,;]? ?"
)
_TAGGED_BOXES = re.compile(r"(?:<ref>([^<]*)</ref>)? ?<box>([^<]*)</box> ?[,;]? ?")
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


def _parse_token_boxes(text: str) -> list[LabeledBox] | None:
    if text.count("<|box_start|>") != text.count("<|box_end|>"):
        return None
    boxes = [_make_box(m.groups()[1:], m.group(1)) for m in _scan(_TOKEN_BOX, text) or ()]
    return None if not boxes or None in boxes else boxes  # type: ignore[return-value]


def _parse_tagged_boxes(text: str) -> list[LabeledBox] | None:
    boxes: list[LabeledBox] = []
    matches = _scan(_TAGGED_BOXES, text)
    for match in matches or ():
        inner = _parse_json_boxes(match.group(2))
        if inner is None or len(boxes) + len(inner) > MAX_ITEMS:
            return None
        boxes += [(box, match.group(1)) for box, _ in inner]
    return boxes if matches else None


def _parse_loc_boxes(text: str) -> list[LabeledBox] | None:
    boxes = [
        _make_box((m.group(2), m.group(1), m.group(4), m.group(3)), m.group(5).strip() or None)
        for m in _scan(_LOC_BOX, text) or ()
    ]
    return None if not boxes or None in boxes else boxes  # type: ignore[return-value]


def _make_box(numbers: Sequence[str | float], label: str | None) -> LabeledBox | None:
    if len(numbers) != 4:
        return None
    x1, y1, x2, y2 = box = tuple(map(float, numbers))
    if not (_in_range(box) and x1 < x2 and y1 < y2):
        return None
    return (x1, y1, x2, y2), label


def _in_range(numbers: Sequence[float]) -> bool:
    return all(math.isfinite(number) and abs(number) <= MAX_COORDINATE for number in numbers)
