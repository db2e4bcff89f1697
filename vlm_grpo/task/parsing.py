"""Parsers of model output for training, evaluation and offline scoring.

Each returns a value or None. None of them raises or evaluates text, and all take linear time.
They accept honest variants of an answer (code fences, floats, number words) and reject answers
that offer a choice, because hedging must not pay.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from vlm_grpo.task.sentences import (
    NUMBER_WORDS,
    ONES,
    TENS,
    Candidate,
    choose,
    fold,
    is_relative,
    is_sure,
    unwrap,
)

# A box (xyxy, in the units that the model wrote) and its label or None.
LabeledBox = tuple[tuple[float, float, float, float], str | None]
Point = tuple[float, float]

MAX_CHARACTERS = 20_000  # of an answer: enough for a page of text or 300 boxes
MAX_COUNT_CHARACTERS = 1_000  # of an answer that contains one number
MAX_DIGITS = 18  # of a count
MAX_ITEMS = 500  # boxes or points in an answer
MAX_COORDINATE = 1e6  # no image is this wide, and areas of larger boxes overflow

_Row = tuple[list[float], str | None]
_Rows = list[_Row]
# Keys with x first and with y first, of boxes and of points; "xyxy" and "xy" are x first in both.
_KEYS = {
    4: (("bbox_2d", "bbox", "box", "xyxy"), ("box_2d", "xyxy")),
    2: (("point_2d", "point", "xy"), ("point", "xy")),
}
_ALL_KEYS = {key for both in _KEYS.values() for keys in both for key in keys}
_LABEL_KEYS = ("label", "class", "category", "name", "object")
_SIDES = [
    names.split()
    for names in (
        *("x1 y1 x2 y2", "xmin ymin xmax ymax", "x_min y_min x_max y_max", "left top right bottom"),
        "x y",
    )
]
# Words before a box that are no part of its label.
_NO_LABELS = re.compile(
    r"\b(?:an?|the|and|at|is|are|of|in|on|here|there|one|located|found|with|position|coordinates"
    r"|visible|sits|seen"
    r"|label|object|bbox|bbox_2d|box)\b",
    re.IGNORECASE,
)
# What begins and ends a text: "<s> A</s>", which other programs leave in outputs.
SPECIAL_TOKENS = re.compile(
    r"\A\s*(?:<s>|<bos>)|(?:</s>|<eos>|<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<\|end\|>"
    r"|<end_of_turn>)\s*\Z"
)


def extract_answer(text: str, tags: bool) -> str | None:
    """Extract the answer from a completion and strip surrounding white space.

    With ``tags`` it is the content of the only ``<answer>…</answer>`` after any thinking, otherwise
    all text after any thinking; None if it is empty, if the thinking is unclosed, repeated or,
    without ``tags``, after other words, or if the tags are missing, unclosed or repeated. GLM-V's
    ``<|begin_of_box|>`` and ``<|end_of_box|>``, which mark its final answer of any kind, are
    removed if both occur once, as are tokens of the start and the end of any model's output.

    >>> extract_answer("<think>4? no</think><answer> 3 </answer>", tags=True)
    '3'
    """
    text = SPECIAL_TOKENS.sub("", text)
    opened, closed = text.count("<think>"), text.count("</think>")
    if opened > 1 or closed > 1 or opened > closed:
        return None
    if closed:
        # Some chat templates open the thinking in the prompt, so only its end is required.
        thought, text = text.split("</think>")
        words = thought.partition("<think>")[0].strip() if opened else ""
        if "<think>" in text or (words and (not tags or "<answer>" in words)):
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


_NUMBER = re.compile(
    r"(?<![^\W_一-鿿])(\d{1,3}(?:,\d{3})+|\d+)(?:\.0+)?(?!\d)"
    rf"|\b(?:({TENS})(?:[ -](one|two|three|four|five|six|seven|eight|nine))?|({ONES}))\b"
)
_NO_COUNT_BEFORE = re.compile(r"(?:\bno ?|[-‐‑‒–—−] ?|[.,])\Z")
_NO_COUNT_AFTER = re.compile(
    r"[a-z_]|[.,]\d|-[a-z]| in on\b"
    r"|[ -]*(?:and (?:a|one) )?(?:half|halves|thirds?|quarters?|pairs?)\b"
)
_STATED_ZERO = re.compile(
    r"\b(there (?:are|were)) no(?= [a-z])|\b(there (?:is|was)) no one\b"
    r"|\b(there (?:is|are))n['’]t (?:any|a single)(?= [a-z])"
    r"|((?:图[片像]?|画面|照片)[中里上])没有(?!数|办|法|给|任何信)"
)
_HAN = re.compile("(?<=有)[一二两三四五六七八九十](?=[只个条辆位名头匹张本把棵座艘架朵块件])")
_EXPLANATION = re.compile(r"[:([]")
_OF_THEM = re.compile(r" of (?:which|whom|them|these|those)\b")


def parse_integer(text: str) -> int | None:
    """Parse the number that an answer states as a non-negative integer.

    Numbers are digits of any script, with or without commas between thousands and a fraction of
    zeros, and the English words zero to ninety-nine, alone or in a phrase ("3 apples", "There are
    three."). "There are no apples" and "There is no one" state zero; no other text without a number
    does, because a refusal to answer must not earn anything.

    The rule for several numbers: all must be equal. Only what follows the first number after a
    colon or an opening bracket may instead add up to it ("3 dogs: one black and two white"), and a
    part of it may follow ("6 chairs, 4 of which are brown"). Hedges ("2 or 3", "at least 3"), and
    negative or fractional numbers give None.

    >>> parse_integer("1,234 apples"), parse_integer("Twenty-two (22)"), parse_integer("2 or 3")
    (1234, 22, None)
    """
    if len(text) > MAX_COUNT_CHARACTERS:
        return None
    # Normalization would turn ½, ² and ③ into plain digits.
    if any(unicodedata.category(character) in ("No", "Nl") for character in text):
        return None
    text = " ".join(re.sub(r"\b_+|_+\b", " ", fold(text).lower()).split())  # Markdown's emphasis
    text = _HAN.sub(
        lambda found: str("零一二三四五六七八九十".index(found[0].replace("两", "二"))), text
    )
    text = _STATED_ZERO.sub(r"\1\2\3\4 0", text)
    found = _NUMBER.finditer(text)
    numbers = [Candidate(number.start(), number.end(), _read_number(number)) for number in found]
    # Digits outside the numbers belong to text such as "x3".
    if any(value is None for *_, value in numbers) or re.search(r"\d", _NUMBER.sub("", text)):
        return None
    parts = [n for n in numbers[1:] if _OF_THEM.match(text, n.end) and n.value < numbers[0].value]
    numbers = [number for number in numbers if number not in parts]
    explanation = _EXPLANATION.search(text, numbers[0].end) if numbers else None
    if explanation is not None:
        explained = [value for start, _, value in numbers if start > explanation.start()]
        if sum(explained) == numbers[0].value:
            numbers = numbers[: len(numbers) - len(explained)]
    return choose(text, numbers, exact=True)


def _read_number(match: re.Match[str]) -> int | None:
    """Return the value of a number, or None if the text next to it makes it something else."""
    text, start, end = match.string, match.start(), match.end()
    if _NO_COUNT_BEFORE.search(text[max(0, start - 5) : start]) or _NO_COUNT_AFTER.match(text, end):
        return None
    digits, *words = match.groups()
    if digits is None:
        return sum(NUMBER_WORDS[word] for word in words if word)
    digits = digits.replace(",", "")
    return int(digits) if len(digits) <= MAX_DIGITS else None


def parse_boxes(
    text: str, units: str = "", y_first: bool = False, named: bool = False
) -> list[LabeledBox] | None:
    """Parse all boxes in an answer.

    The forms are JSON, alone or among words, also with named sides, by label, or with Gemma 4's
    ``box_2d``; four numbers in round brackets, alone, in a row of a table or after the names of the
    sides; and the tokens of Qwen2-VL (``<|box_start|>``), InternVL and Qwen-VL (``<box>``), GLM-V
    and PaliGemma (``<loc…>``, in the order y1 x1 y2 x2). ``[]`` means that there are none.

    Words must leave the boxes alone (``sentences``) and have no number, except those of ``units``,
    of a list's items, and the number of boxes. One box after another is a list; a list that is
    repeated must be equal each time.

    Args:
        units: the prompt's description of the units, whose numbers the answer may repeat
            ("in pixels of the 640x480 image").
        y_first: whether JSON has y before x, under ``box_2d``.
        named: whether words before a box without a label are its label ("cat: [1, 2, 3, 4]").

    Returns:
        Boxes as xyxy in the units that the model wrote, each with its label or None; None if any
        part of the answer is malformed or any box is inverted, empty, not finite or truncated.

    >>> parse_boxes('[{"bbox_2d": [1, 2, 3, 4.5], "label": "cat"}]')
    [((1.0, 2.0, 3.0, 4.5), 'cat')]
    """
    rows = _parse_rows(text, 4, units, y_first, named)
    if rows is None or not all(len(row) == 4 and _in_range(row) for row, _ in rows):
        return None
    boxes = [((x1, y1, x2, y2), label) for (x1, y1, x2, y2), label in rows]
    return boxes if all(x1 < x2 and y1 < y2 for (x1, y1, x2, y2), _ in boxes) else None


def parse_points(text: str, units: str = "", y_first: bool = False) -> list[Point] | None:
    """Parse all points (x, y) in an answer, in the model's units; None if any part is malformed.

    The accepted forms are JSON (an object with ``point_2d`` or with x and y, a list of two numbers,
    or a list of either), (x, y), also in Qwen2-VL's box tokens or ``<point>``, and ``x=1, y=2``; if
    the units are per cent, also Molmo's ``<point x="1.5" y="2.5">``. The rest is as for
    ``parse_boxes``.

    >>> parse_points('[{"point_2d": [10, 20.5]}, [3, 4]]')
    [(10.0, 20.5), (3.0, 4.0)]
    """
    rows = _parse_rows(text, 2, units, y_first)
    if rows is None or not all(len(row) == 2 and _in_range(row) for row, _ in rows):
        return None
    return [(row[0], row[1]) for row, _ in rows]


def _parse_rows(
    text: str, length: int, units: str, y_first: bool, named: bool = False
) -> _Rows | None:
    """Return the lists of numbers, x first, with labels, that an answer states."""
    if len(text) > MAX_CHARACTERS:
        return None
    # Single white space keeps the patterns linear.
    lines = unwrap(text, lead=False).split("\n")
    text = "\n".join(" ".join(line.split()) for line in lines if line.strip())
    for pattern, replacement in _FORMS[length]:
        text = re.sub(pattern, replacement, text)
    if units.endswith("0-100"):
        text = re.sub(_MOLMO, _rewrite_molmo, text)
    if in_pixels := "scaled" not in units:
        text = re.sub(r"(?<=\d)\s?(?:px|pixels?)\b", "", text)
    for pattern in _BARE[length]:
        if not re.search(r"[\[{]", text):
            text = re.sub(pattern, _rewrite, text)
    values, parts = find_json(text)
    keys = _KEYS[length][y_first]
    rows = _join(values, [_parse_json_value(value, keys, y_first) for value in values])
    words = "|".join(parts)
    if (
        rows is None
        or len(rows) > MAX_ITEMS
        or _has_number(words, units, len(rows))
        or re.search(_TOKEN, words)
        or (in_pixels and re.search(_OTHER_UNIT, words))
        or (not is_sure(words) if rows else re.search(_UNKNOWN, words))
        or any(map(is_relative, parts[:-1]))
    ):
        return None
    if named and len(rows) == len(values):
        name = None
        for i, (row, label) in enumerate(rows):
            name = _find_label(parts[i]) or name
            rows[i] = (row, label or name)
    return rows


def _join(values: Sequence[Any], statements: Sequence[_Rows | None]) -> _Rows | None:
    """Return the boxes of an answer one after another, or what all of its lists agree on."""
    found = [rows for rows in statements if rows is not None]
    if not found or len(found) < len(statements):
        return None
    numbers = [row for row, _ in found[0]]
    if all([row for row, _ in rows] == numbers for rows in found):
        labels = {tuple(label for _, label in rows) for rows in found}
        labels = {named for named in labels if any(named)} or labels
        # Statements may leave out the labels.
        return list(zip(numbers, labels.pop(), strict=True)) if len(labels) == 1 else None
    are_lists = (isinstance(v, list) and not isinstance((*v, None)[0], str | float) for v in values)
    return None if any(are_lists) else [row for rows in found for row in rows]


def _has_number(words: str, units: str, count: int) -> bool:
    """Return whether the text around an answer has a number that ``units`` does not have, and that
    is not the number of things ("2 dogs:") or of an item in a list."""
    words = re.sub(r" ?[x×] ?(?=\d)", "x", words)
    for phrase in re.findall(r"\d+[x-]\d+", units):
        words = re.sub(rf"(?<!\d){phrase}(?!\d)", "", words)
    words = re.sub(
        rf"\b{count} (?=[a-z])|^\d{{1,3}}[.)] |\b[xy]_?[12]\b|_2d\b", " ", words, flags=re.M
    )
    return any(map(str.isnumeric, words))


def _find_label(words: str) -> str | None:
    """Return the last words before a box, without articles and the like."""
    groups = re.split(r"[\n.,:;|]", _NO_LABELS.sub("|", words))
    names = (" ".join(re.findall(r"[^\W_][\w'-]*", group)) for group in reversed(groups))
    return next(filter(None, names), None)


def _parse_json_value(
    value: Any, keys: Sequence[str], y_first: bool, depth: int = 4
) -> _Rows | None:
    """Return the rows of a JSON value: a row, a list of rows, or an object of either by label."""
    named = depth == 4 and isinstance(value, dict) and value.items()
    if named and all(name and item == [] for name, item in named):  # {"objects": []}
        return []
    if (row := _parse_json_row(value, keys, y_first)) is not None:
        return [row]
    if not isinstance(value, list | dict) or len(value) > MAX_ITEMS or not depth:
        return None
    items, label, names, counts = [("", item) for item in value], None, None, []
    if isinstance(value, dict):
        label = next((x for key in _LABEL_KEYS if isinstance(x := value.get(key), str)), None)
        names, counts = value.pop("labels", None), [x for x in value.values() if type(x) is float]
        items = [(key, x) for key, x in value.items() if not isinstance(x, str | float | None)]
        if not items or not _ALL_KEYS.isdisjoint(value):
            return None
    rows: _Rows = []
    for key, item in items:
        inner = _parse_json_value(item, keys, y_first, depth - 1) if item != [] else None
        if inner is None:
            return None
        own = label or key or None
        rows += [(numbers, own if name is None else name) for numbers, name in inner]
    if names is not None:
        if not isinstance(names, list) or [type(name) for name in names] != [str] * len(rows):
            return None
        rows = [(row, name) for (row, _), name in zip(rows, names, strict=True)]
    return rows if set(counts) <= {len(rows)} else None


def _parse_json_row(item: Any, keys: Sequence[str], y_first: bool, depth: int = 2) -> _Row | None:
    """Return the numbers, x first, and the label of a box or point."""
    label, inner = None, None
    if isinstance(item, dict):
        labels = {x for key in _LABEL_KEYS if isinstance(x := item.get(key), str)}
        present = _ALL_KEYS & item.keys()
        sides = next((names for names in _SIDES if item.keys() >= {*names}), [])
        others = [x for key, x in item.items() if key not in present and key not in sides]
        if len(present) + bool(sides) != 1 or not present <= {*keys} or len(labels) > 1:
            return None
        # A further list, or number beside sides, is another answer, and false denies this one.
        another = list | dict | float if sides else list | dict
        if any(x is False or isinstance(x, another) for x in others):
            return None
        y_first = y_first and not sides and present.isdisjoint(("xyxy", "xy"))
        inner, label = [item[side] for side in sides], next(iter(labels), None)
        for key in present:
            inner = item[key]
            if isinstance(inner, list) and all(isinstance(x, list) for x in inner):  # corners
                inner = [x for corner in inner for x in corner]
            if isinstance(inner, str) and _LIST.fullmatch(inner):
                inner = re.findall(_N, inner)
    elif isinstance(item, list) and [type(x) for x in item] == [str, list]:
        label, inner = item
    if inner is not None:
        row = _parse_json_row(inner, keys, y_first, depth - 1) if depth else None
        return None if row is None else (row[0], label)
    if not isinstance(item, list) or not 0 < len(item) <= 4:
        return None
    numbers = [float(x) for x in item if isinstance(x, float) or re.fullmatch(_N, str(x))]
    if len(numbers) < len(item):  # such as a boolean
        return None
    return ([*numbers[1::-1], *numbers[:1:-1]] if y_first else numbers), None


def find_json(text: str) -> tuple[list[Any], list[str]]:
    """Return the JSON lists and objects in a text, and the parts of the text around them.

    Other quotes, keys without quotes, commas at the end of a list and spaces between numbers are
    read too. There are no values if one is malformed or there are more than ``MAX_ITEMS``.
    """
    if '"' not in text:
        text = re.sub(r"(?<![^\W\d_])['“”]|['“”](?![^\W\d_])", '"', text)  # not the one of "can't"
    if (found := _decode(text)) is None:
        for pattern, replacement in _REPAIRS:
            text = pattern.sub(replacement, text)
        found = _decode(text)
    return found or ([], [text])


def _decode(text: str) -> tuple[list[Any], list[str]] | None:
    values, parts, position = [], [], 0
    while (start := _JSON_START.search(text, position)) is not None:
        parts.append(text[position : start.start()])
        if len(values) == MAX_ITEMS:
            return None
        try:
            value, position = _JSON.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            return None
        values.append(value)
    return values, [*parts, text[position:]]


def refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def refuse_repeated_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object; ``ValueError``: a key is repeated, with two answers."""
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key!r} is repeated")
        value[key] = item
    return value


_JSON_START = re.compile(r"[\[{]")
_JSON = json.JSONDecoder(
    # As a float, a number of 10,000 digits is infinite; as an int it is an error.
    parse_int=float,
    parse_constant=refuse_constant,
    object_pairs_hook=refuse_repeated_keys,
)
_REPAIRS = (
    (re.compile(r'\\"'), '"'),
    (re.compile(r"([{,]\s?)([A-Za-z_]\w{0,30})\s?:"), r'\1"\2":'),
    (re.compile(r",(?=\s?[\]}])"), ""),
    (re.compile(r"(?<=\d)\s(?=-?\d)"), ", "),
)

_N = r"-?\d{1,9}(?:\.\d{0,9})?"
_X1, _Y1, _X2, _Y2 = (rf"(?P<{name}>{_N})" for name in ("x1", "y1", "x2", "y2"))
_FIRST, _SECOND = rf"\(\s?{_X1}\s?,\s?{_Y1}\s?\)", rf"\(\s?{_X2}\s?,\s?{_Y2}\s?\)"
_LIST = re.compile(rf"[\[(]?\s?{_N}(?:\s?,\s?{_N}){{0,3}}\s?[\])]?")
# Words that make "[]" no statement; that nothing can be found is one.
_UNKNOWN = (
    r"(?i:\b(?:might|maybe|perhaps|possibly|probably|unsure|uncertain|unclear|sorry|not sure"
    r"|do(?: not|n['’]t) know"
    r"|(?:can ?not|can['’]t|unable to) (?:answer|tell|say|help|assist|determine))\b)"
)
_TOKEN = r"<(?:\|(?!(?:begin|end)_of_box)|loc|/?box|/?ref|/?point)"
_OTHER_UNIT = (
    r"(?i:[%‰]|\b(?:thousandths?|per ?mille|percent\w*|normali[sz]ed|fractions?|relative"
    r"|inch(?:es)?|[cm]m)\b)"
)


def _rewrite(match: re.Match[str]) -> str:
    """Write a box or a point as JSON, x first."""
    found = match.groupdict()
    numbers = [float(found[name]) for name in ("x1", "y1", "x2", "y2") if found.get(name)]
    label = (found.get("label") or "").strip() or None
    return json.dumps({"xyxy" if len(numbers) == 4 else "xy": numbers, "label": label})


def _rewrite_tags(match: re.Match[str]) -> str:
    inner = match["inner"]
    inner = inner if re.search(r"[\[{]", inner) else f"[{inner}]"
    return f"{{{json.dumps(match.groupdict().get('label') or '')}: {inner}}}"


def _rewrite_molmo(match: re.Match[str]) -> str:
    numbers = re.findall(r'"([^"]*)"', match[1])
    return " ".join(f"[{x}, {y}]" for x, y in zip(numbers[::2], numbers[1::2], strict=False))


# Forms of boxes and of points other than JSON, and how they are written as JSON.
_LOC = "".join(rf"<loc(?P<{name}>\d{{4}})>\s?" for name in ("y1", "x1", "y2", "x2"))
_GAP = r"[^()\[\]{}\d]{1,20}"
_FORMS: dict[int, list[tuple[str, str | Callable[[re.Match[str]], str]]]] = {
    4: [
        (rf"{_LOC}(?P<label>[^<;]*);?", _rewrite),
        (
            r"(?:<\|object_ref_start\|>(?P<label>[^<]*)<\|object_ref_end\|>\s?)?"
            rf"(?P<open><\|box_start\|>\s?)?{_FIRST}\s?,\s?{_SECOND}(?(open)\s?<\|box_end\|>)",
            _rewrite,
        ),
        (r"(?:<ref>(?P<label>[^<]*)</ref>\s?)?<box>(?P<inner>[^<]*)</box>", _rewrite_tags),
        (rf"(?i:top[- ]left){_GAP}{_FIRST}{_GAP}(?i:bottom[- ]right){_GAP}{_SECOND}", _rewrite),
        (rf"(?i:\b(?:run|extend|span|stretche?)s?) from {_FIRST} to {_SECOND}", _rewrite),
        (rf"[(<](\s?{_N}(?:\s?,\s?{_N}){{3}}\s?)[)>]", r"[\1]"),
        (rf"(?<=\d)\s?;\s?(?={_N})", ", "),
    ],
    2: [
        (r"<point>(?P<inner>[^<]*)</point>", _rewrite_tags),
        (rf"(<\|box_start\|>\s?)?\((\s?{_N}\s?,\s?{_N}\s?)\)(?(1)\s?<\|box_end\|>)", r"[\2]"),
    ],
}
_MOLMO = (
    r"<points?((?:\s[xy]\d{0,3}=\"[\d.]{1,9}\"){2,1000})(?:\salt=\"[^\"<>]*\")?>[^<]*</points?>"
)
# Numbers without brackets, after the names of the sides or alone.
_BEFORE, _AFTER = r"(?<![\w.,-])(?<!,\s)(?<!\d\s\|\s)", r"(?![\w%])(?!\s?[,|.]?\s?-?\d)"
_COMMA, _NEXT, _TO = r"\s?[,|]\s?", r"\W{1,6}", r"(?:\s?[-–—]\s?|\sto\s(?:[xy]\s?=\s?)?)"
_BARE = {
    4: (
        rf"(?i:x_?1|x_?min|left)\W{{1,4}}{_X1}{_NEXT}(?i:y_?1|y_?min|top)\W{{1,4}}{_Y1}{_NEXT}"
        rf"(?i:x_?2|x_?max|right)\W{{1,4}}{_X2}{_NEXT}(?i:y_?2|y_?max|bottom)\W{{1,4}}{_Y2}",
        rf"\b[xX]\W{{1,4}}{_X1}{_TO}{_X2}[^\d{{}}]{{1,30}}\b[yY]\W{{1,4}}{_Y1}{_TO}{_Y2}",
        rf"{_BEFORE}{_X1}{_COMMA}{_Y1}{_COMMA}{_X2}{_COMMA}{_Y2}{_AFTER}",
    ),
    2: (rf"\b[xX]\W{{1,4}}{_X1}{_NEXT}[yY]\W{{1,4}}{_Y1}", rf"{_BEFORE}{_X1}{_COMMA}{_Y1}{_AFTER}"),
}


def _in_range(numbers: Sequence[float]) -> bool:
    return all(math.isfinite(number) and abs(number) <= MAX_COORDINATE for number in numbers)
