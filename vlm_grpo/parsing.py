"""Model text to a value, or None: the one reader for training, evaluation and offline scoring.

Nothing here raises on any text, evaluates text, or takes more than linear time in its length.
An answer is read generously where writing varies honestly (fences, floats, words for numbers),
and is no answer where it offers a choice: hedging must not pay.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

LabelledBox = tuple[tuple[float, float, float, float], str | None]
"""xyxy in the units that the model wrote, and the label if there is one."""

MAX_CHARACTERS = 20_000
"""Longer answers are no answers: a page of text or 300 boxes fit, and padding costs no time."""
MAX_COUNT_CHARACTERS = 1_000
"""The same for an answer that holds one number."""
MAX_ITEMS = 500
"""The same for an answer that lists more boxes or points: no honest one does."""
MAX_COORDINATE = 1e6
"""No image is this wide; larger numbers overflow in areas."""

_BOX_KEYS = ("bbox_2d", "bbox", "box")
_POINT_KEYS = ("point_2d", "point")


def answer_text(text: str, tags: bool) -> str | None:
    """The part of a completion that holds its answer, without white space at its ends.

    Args:
        text: the whole completion.
        tags: the prompt asked for ``<answer>…</answer>``: the answer is inside the only such
            pair after any thinking. Otherwise it is all the text after any thinking.

    Returns:
        None where thinking is not closed or opened again, where the tags are missing, several
        or unclosed, and where the answer is empty.

    >>> answer_text("<think>4? no</think><answer> 3 </answer>", tags=True)
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
# Words after which a number is no single claim, and words that make a larger or smaller number.
_NO_CLAIM = re.compile(
    r"\b(?:or|nor|not|never|neither|between|least|most|more|less|fewer|than|approximately|approx"
    r"|roughly|circa|nearly|almost|maybe|perhaps|possibly|probably|several|minus|negative|plus"
    r"|up to|point|dozens?|hundreds?|thousands?|millions?"
    r"|billions?|thirty|forty|fifty|sixty|seventy|eighty|ninety|percent)\b"
)
_HEDGE_BEFORE = re.compile(r"\b(?:about|around|over|under|above|below)\s*\Z")
_PART_AFTER = re.compile(r"[\s-]*(?:and\s+(?:a|one)\s+)?(?:half|halves|thirds?|quarters?|pairs?)\b")
_NO_CLAIM_SIGNS = frozenset("<>~≈±≤≥+?%/^")
_MINUS_BEFORE = re.compile(r"[-‐‑‒–—−]\s*\Z")
_MAX_DIGITS = 18


def parse_integer(text: str) -> int | None:
    """The one whole, non-negative number in an answer, or None.

    Digits of any script, thousands separated by commas, and the English words zero to twenty
    count as numbers, alone or in a phrase ("3 apples", "There are three."). None for several
    numbers, hedges ("2 or 3", "at least 3"), and negative or fractional numbers.

    >>> parse_integer("1,234 apples"), parse_integer("twelve"), parse_integer("2 or 3")
    (1234, 12, None)
    """
    if len(text) > MAX_COUNT_CHARACTERS:
        return None
    # ½, ² and ③ would fold into plain digits: they are numbers, and not whole or not digits.
    if any(unicodedata.category(character) in ("No", "Nl") for character in text):
        return None
    text = unicodedata.normalize("NFKC", text).lower()
    if not _NO_CLAIM_SIGNS.isdisjoint(text) or _NO_CLAIM.search(text):
        return None
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or sum(map(str.isdecimal, text)) > _MAX_DIGITS:
        return None
    number = numbers[0].group()
    before, after = text[: numbers[0].start()], text[numbers[0].end() :]
    # Digits that the pattern left out belong to something like "x3", "3.5", "1,23" or "3rd".
    if re.search(r"\d", before + after) or re.match(r"[a-z]|[.,]\d", after):
        return None
    if _PART_AFTER.match(after):
        return None
    if _MINUS_BEFORE.search(before) or _HEDGE_BEFORE.search(before) or before.endswith((".", ",")):
        return None
    return _NUMBER_WORDS[number] if number in _NUMBER_WORDS else int(number.replace(",", ""))


def parse_boxes(text: str) -> list[LabelledBox] | None:
    """Every box in an answer, or None where any part of it is malformed.

    Read are JSON (an object with ``bbox_2d``, a bare list of four numbers, or a list of
    either), fenced or with words around it; Qwen2-VL's ``<|box_start|>(x1,y1),(x2,y2)
    <|box_end|>``; InternVL's ``<box>[[x1,y1,x2,y2]]</box>``; and PaliGemma's four ``<loc…>``
    tokens in the order y1 x1 y2 x2. ``[]`` is the answer "there is none".

    Returns:
        Boxes as xyxy in the units that the model wrote, each with its label or None. The whole
        answer is None where a box is reversed, without area, not finite, or cut off.

    >>> parse_boxes('[{"bbox_2d": [1, 2, 3, 4.5], "label": "cat"}]')
    [((1.0, 2.0, 3.0, 4.5), 'cat')]
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = " ".join(text.split())  # single spaces keep the patterns below linear
    if "<loc" in text:
        return _loc_boxes(text)
    if "<box>" in text:
        return _tagged_boxes(text)
    if "<|box_start|>" in text or text.startswith("("):
        return _token_boxes(text)
    return _json_boxes(text)


def parse_points(text: str) -> list[tuple[float, float]] | None:
    """Every point in an answer, or None where any part of it is malformed.

    Read is JSON: an object with ``point_2d``, a bare list of two numbers, or a list of either.

    >>> parse_points('[{"point_2d": [10, 20.5]}, [3, 4]]')
    [(10.0, 20.5), (3.0, 4.0)]
    """
    found = _json_rows(text, _POINT_KEYS)
    if found is None or not all(len(row) == 2 and _in_range(row) for row, _ in found):
        return None
    return [(row[0], row[1]) for row, _ in found]


def _json_boxes(text: str) -> list[LabelledBox] | None:
    rows = _json_rows(text, _BOX_KEYS)
    boxes = None if rows is None else [_box(row, label) for row, label in rows]
    return None if boxes is None or None in boxes else boxes  # type: ignore[return-value]


def _json_rows(text: str, keys: Sequence[str]) -> list[tuple[list[float], str | None]] | None:
    """The lists of numbers, with labels, in the one JSON value among words without numbers."""
    if len(text) > MAX_CHARACTERS:
        return None
    starts = [position for mark in "[{" if (position := text.find(mark)) >= 0]
    end = max(text.rfind("]"), text.rfind("}")) + 1
    if not starts or end <= min(starts):
        return None
    start = min(starts)
    around = text[:start] + text[end:]
    if any(map(str.isdecimal, around)):  # numbers in the words around are further answers
        return None
    value = _load_json(text[start:end])
    if isinstance(value, dict) or (isinstance(value, list) and _is_number(*value[:1])):
        value = [value]
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        return None
    rows = [_json_row(item, keys) for item in value]
    return None if None in rows else rows  # type: ignore[return-value]


def _json_row(item: Any, keys: Sequence[str]) -> tuple[list[float], str | None] | None:
    label = None
    if isinstance(item, dict):
        present = [key for key in keys if key in item]
        label = item.get("label")
        if len(present) != 1 or not (label is None or isinstance(label, str)):
            return None
        item = item[present[0]]
    if not isinstance(item, list) or len(item) > 4 or not _is_number(*item):
        return None
    return item, label


def _load_json(text: str) -> Any | None:
    if '"' not in text:
        text = text.replace("'", '"')  # the same object in Python's quotes
    try:
        # Numbers become floats, so that 10,000 digits are infinite rather than an error.
        return json.loads(
            text,
            parse_int=float,
            parse_constant=_refuse,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # the same key twice is two answers
        raise ValueError("a key is repeated")
    return found


def _is_number(*values: Any) -> bool:
    """True if there are values and each is a number as JSON has it: true and false are none."""
    return bool(values) and all(isinstance(value, float) for value in values)


_N = r"(-?\d{1,9}(?:\.\d{0,9})?)"
_TOKEN_BOX = re.compile(
    r"(?:<\|object_ref_start\|>([^<]*)<\|object_ref_end\|>)? ?(?:<\|box_start\|>)? ?"
    rf"\( ?{_N} ?, ?{_N} ?\) ?, ?\( ?{_N} ?, ?{_N} ?\) ?(?:<\|box_end\|>)? ?[,;]? ?"
)
_TAGGED_BOXES = re.compile(r"(?:<ref>([^<]*)</ref>)? ?<box>([^<]*)</box> ?[,;]? ?")
_LOC_BOX = re.compile(r"<loc(\d{4})> ?<loc(\d{4})> ?<loc(\d{4})> ?<loc(\d{4})> ?([^<;]*)(?:; ?|\Z)")


def _scan(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
    """The matches that cover the whole text one after another, or None."""
    found, position = [], 0
    while position < len(text):
        match = pattern.match(text, position)
        if match is None or len(found) == MAX_ITEMS:
            return None
        found.append(match)
        position = match.end()
    return found


def _token_boxes(text: str) -> list[LabelledBox] | None:
    if text.count("<|box_start|>") != text.count("<|box_end|>"):
        return None
    boxes = [_box(m.groups()[1:], m.group(1)) for m in _scan(_TOKEN_BOX, text) or ()]
    return None if not boxes or None in boxes else boxes  # type: ignore[return-value]


def _tagged_boxes(text: str) -> list[LabelledBox] | None:
    found: list[LabelledBox] = []
    matches = _scan(_TAGGED_BOXES, text)
    for match in matches or ():
        boxes = _json_boxes(match.group(2))
        if boxes is None or len(found) + len(boxes) > MAX_ITEMS:
            return None
        found += [(box, match.group(1)) for box, _ in boxes]
    return found if matches else None


def _loc_boxes(text: str) -> list[LabelledBox] | None:
    boxes = [
        _box((m.group(2), m.group(1), m.group(4), m.group(3)), m.group(5).strip() or None)
        for m in _scan(_LOC_BOX, text) or ()
    ]
    return None if not boxes or None in boxes else boxes  # type: ignore[return-value]


def _box(numbers: Sequence[str | float], label: str | None) -> LabelledBox | None:
    if len(numbers) != 4:
        return None
    x1, y1, x2, y2 = box = tuple(map(float, numbers))
    if not (_in_range(box) and x1 < x2 and y1 < y2):
        return None
    return (x1, y1, x2, y2), label


def _in_range(numbers: Sequence[float]) -> bool:
    return all(math.isfinite(number) and abs(number) <= MAX_COORDINATE for number in numbers)
