"""The parsers of outputs of the official scripts of benchmarks.

A published figure was made with its script's parser, which may accept more or less than the task's.
Readers decide metrics of benchmarks only; rewards use the strict parser of the task. No reader
raises, and all take linear time.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from string import ascii_uppercase
from typing import Any

from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import FRACTION, PERMILLE, Box
from vlm_grpo.task.parsing import MAX_DIGITS, NUMBER_WORDS, SPECIAL_TOKENS, LabeledBox, parse_boxes
from vlm_grpo.types import Example

Read = Callable[[str, Example, Task], Any | None]
"""Reads the answer in an output, in the form of ``task.parse``; None: it has none."""


READERS: dict[str, Read] = {}
"""Readers by the name that a benchmark's ``reader`` gives; their docstrings say what they read, and
which script's rule they follow."""


def _reader(read: Read) -> Read:
    READERS[read.__name__.removeprefix("_read_")] = read
    return read


def describe_reader(name: str) -> str:
    return " ".join(str(READERS[name].__doc__).split())


def unwrap(text: str) -> str:
    """Return the text in the last ``<answer>`` tags, or after the thinking, or the full text.

    Tokens of the start and the end of any model's output, which other programs leave, are removed.

    >>> unwrap("<think>4?</think><answer> 3 </answer>"), unwrap("<s> 3</s>"), unwrap("3 ")
    ('3', '3', '3 ')
    """
    if (plain := SPECIAL_TOKENS.sub("", text)) != text:
        text = plain.strip()
    inside, closed, _ = text.rpartition("</answer>")
    _, opened, answer = inside.rpartition("<answer>")
    if closed and opened:
        return answer.strip()
    _, thinking, rest = text.rpartition("</think>")
    return rest.strip() if thinking else text


@_reader
def _read_full_text(text: str, example: Example, task: Task) -> str:
    """the full output, with any thinking and tags (MultimodalOCR, example.py and eval.py)"""
    return text


@_reader
def _read_text(text: str, example: Example, task: Task) -> str:
    """the output without thinking and tags"""
    return unwrap(text)


def _get_first_tagged(text: str, task: Task) -> str | None:
    """Return the text in the first ``<answer>`` tags, which scripts that ask for tags read.

    If neither the prompt asks for tags nor the output has them, it is the full text.
    """
    if not task.tags and "<answer>" not in text:
        return text
    answer, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    return answer if closed else None


_COUNTS = {word: n for word, n in NUMBER_WORDS.items() if n <= 20} | {"none": 0}
_MAX_DIGITS = 4_000
"""Python converts no more than 4,300 digits to an integer."""


@_reader
def _read_bare_count(text: str, example: Example, task: Task) -> int | None:
    """a number or a word up to twenty, without any other text (big_vision, tallyqa.py)"""
    answer = unwrap(text).strip()
    if re.fullmatch(r"0|[1-9][0-9]*", answer):  # the script compares texts: 03 is not 3
        return int(answer[:_MAX_DIGITS])
    return _COUNTS.get(answer.lower())


@_reader
def _read_tagged_count(text: str, example: Example, task: Task) -> int | None:
    """digits alone in answer tags (R1-V, test_qwen2vl_counting_superclevr.py)"""
    for answer in text.split("<answer>")[1:] if task.tags or "<answer>" in text else [text]:
        digits, closed, _ = answer.partition("</answer>")
        if (closed or answer is text) and re.fullmatch(r"\d+", digits := digits.strip()):
            return int(digits[:_MAX_DIGITS])
    return None


@_reader
def _read_first_digits(text: str, example: Example, task: Task) -> int | None:
    """the first digits, compared as text (lmms-eval, pixmo_count/utils.py)"""
    found = re.search(r"\d+", unwrap(text))
    is_plain = found is not None and re.fullmatch(r"0|[1-9][0-9]*", found[0])
    return int(found[0][:_MAX_DIGITS]) if found is not None and is_plain else None


@_reader
def _read_any_count(text: str, example: Example, task: Task) -> Any | None:
    """the number that the text states, or else the first in it; no script has a rule"""
    answer = unwrap(text)
    if (count := task.parse(answer, example)) is not None:
        return count
    found = re.search(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+", answer)
    return None if found is None else int(found[0].replace(",", "")[:MAX_DIGITS])


_N = r"(-?\d+(?:\.\d+)?)"
_FOUR = rf"\s*{_N},\s*{_N},\s*{_N},\s*{_N}\s*"


def _find_brackets(text: str, opening: str = r"\[", closing: str = r"\]") -> Sequence[str] | None:
    found = re.search(rf"[{opening}]{_FOUR}[{closing}]", text)
    return found.groups() if found else None


def _find_internvl(text: str) -> Sequence[str] | None:
    """Return what the first line with ``[…,…,…,…]`` has between its commas: text is no number."""
    for line in text.split("\n"):
        first, *parts = line.partition("[")[2].lstrip("[").split(",", 3)
        if len(parts) == 3 and "]" in parts[2]:
            return [first, *parts[:2], parts[2].partition("]")[0]]
    return None


def _find_parentheses(text: str) -> Sequence[str] | None:
    for line in text.split("\n"):
        middle = line.find("),(", line.find("(") + 1)
        if "(" in line and middle >= 0 and ")" in line[middle + 3 :]:
            first, second = line[line.find("(") + 1 : middle], line[middle + 3 :].partition(")")[0]
            pairs = [first.split(","), second.split(",")]
            return [*pairs[0], *pairs[1]] if all(len(pair) == 2 for pair in pairs) else None
    return None


def _find_locations(text: str) -> Sequence[str] | None:
    found = re.search(r"<loc(\d{4})>" * 4, text)
    return None if found is None else [found[i] for i in (2, 1, 4, 3)]


_FINDERS = {
    "qwen2_vl": _find_parentheses,
    "internvl": _find_internvl,
    "paligemma": _find_locations,
    # Its card lets the kind of brackets vary.
    "glm": partial(_find_brackets, opening=r"\[(<", closing=r"\])>"),
}
"""The first box in the grammar of a frame; the others write brackets."""


@_reader
def _read_first_box(text: str, example: Example, task: Task) -> tuple[Box, ...] | None:
    """the first box in the model's grammar: [x1, y1, x2, y2] anywhere (lmms-eval,
    refcoco/utils_rec.py), [[x1, y1, x2, y2]] (InternVL, evaluate_grounding.py) or (x1,y1),(x2,y2),
    divided by 999 (Qwen-VL, evaluate_grounding.py)"""
    return _convert(_FINDERS.get(task.frame.name, _find_brackets)(unwrap(text)), example, task)


@_reader
def _read_last_integer_box(text: str, example: Example, task: Task) -> tuple[Box, ...] | None:
    """the last [x1, y1, x2, y2] of integers inside braces in answer tags (VLM-R1,
    test_rec_r1.py)"""
    answer = _get_first_tagged(text, task) or ""
    inside = answer[answer.find("{") + 1 : max(0, answer.rfind("}"))] if "{" in answer else ""
    found = re.findall(r"\[(\d+),\s*(\d+),\s*(\d+),\s*(\d+)\]", inside)
    return _convert(found[-1] if found else None, example, task)


def _convert(numbers: Sequence[str] | None, example: Example, task: Task) -> tuple[Box, ...] | None:
    """Return the box in original pixels; None if it is not four finite numbers."""
    try:
        x1, y1, x2, y2 = map(float, numbers or ())
    except ValueError:
        return None
    image, frame = example.images[0], task.frame
    if frame.y_first:
        x1, y1, x2, y2 = y1, x1, y2, x2
    # The scripts of these two divide otherwise than their models multiply.
    if frame.name == "qwen2_vl":
        frame = replace(frame, span=999)
    elif frame.name == "internvl" and x1 + y1 + x2 + y2 < 4:
        frame = FRACTION
    box = frame.to_pixels((x1, y1, x2, y2), image.size, image.resized_size)
    return (box,) if all(map(math.isfinite, box)) else None


_THOUSANDTHS = r"(\d{1,3}|1000),\s*(\d{1,3}|1000)(?!\d)"
_CLICKS = (
    (rf"<\|box_start\|>[(\[]*{_THOUSANDTHS}[)\]]*,\s*[(\[]*{_THOUSANDTHS}", PERMILLE),
    (r"<box>\((\d{1,9}),(\d{1,9})\),\((\d{1,9}),(\d{1,9})\)</box>", PERMILLE),
    (rf"\[\[\s*{_N},\s*{_N}(?:,\s*{_N},\s*{_N})?\s*\]\]", None),
    (r"x=(0(?:\.\d+)?|1(?:\.0+)?), y=(0(?:\.\d+)?|1(?:\.0+)?)", FRACTION),
)
"""Forms of a place that only some models write, and their units; None: those of the frame."""


@_reader
def _read_click(text: str, example: Example, task: Task) -> Any | None:
    """two numbers, or the center of four: those in a tool call, in box tokens, in [[…]] or after x=
    and y= (ScreenSpot-Pro's parser of each model), in <box> as thousandths, or the only ones of a
    text without the word box (SeeClick, screenspot_test.py)"""
    answer = unwrap(text)
    if "<tool_call>" in answer:
        return _read_call(answer, example, task)
    plain = re.sub(r'"(?:point|bbox|box)(?:_2d)?"', "", answer)
    for pattern, frame in _CLICKS:
        if (found := re.search(pattern, plain)) is not None:
            numbers = [float(number) for number in found.groups() if number is not None]
            task = task if frame is None else replace(task, frame=frame)
            return _click(numbers, example, task)
    if "box" in plain:
        return None
    return _click([float(n) for n in re.findall(r"-?\d+\.?\d*", plain)], example, task)


def _read_call(text: str, example: Example, task: Task) -> Any | None:
    """Read the coordinate of the first call, whatever its action."""
    call = text.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
    try:
        place = json.loads(call[: call.rfind("}") + 1])["arguments"]["coordinate"]
        numbers = [float(number) for number in place] if isinstance(place, list) else []
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return None
    return _click(numbers, example, task)


def _click(numbers: Sequence[float], example: Example, task: Task) -> Any | None:
    if len(numbers) == 4:
        numbers = [(numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2]
    return task.parse(json.dumps(numbers), example) if len(numbers) == 2 else None


@_reader
def _read_first_letter(text: str, example: Example, task: Task) -> Any | None:
    """the first letter, after brackets at most (lmms-eval, cv_bench/utils.py)"""
    found = re.match(r"[(\s]*([A-Za-z])", unwrap(text))
    letters = ascii_uppercase[: len(example.answer.get("options", ()))]
    return task.parse(found[1], example) if found and found[1].upper() in letters else None


_LETTER_PLACES = (
    r"^([A-D])",
    r"(?:ANSWER|CHOICE|OPTION)(?:\s+IS)?[\s:]+([A-D])",
    r"\(([A-D])\)",
    r"([A-D])\s*[.)\]]",
    r"(?:^|\s)([A-D])(?:\s|$)",
    r"^[^A-D]*([A-D])[^A-D]*$",
)


@_reader
def _read_any_letter(text: str, example: Example, task: Task) -> Any | None:
    """a letter at the start, after the word answer, choice or option, in brackets, before a period
    or a bracket, or between spaces, else the only one (lmms-eval, vstar_bench/utils.py)"""
    answer = unwrap(text).strip().upper()
    found = next(filter(None, (re.search(place, answer) for place in _LETTER_PLACES)), None)
    letters = ascii_uppercase[: len(example.answer.get("options", ()))]
    return task.parse(found[1], example) if found and found[1] in letters else None


@_reader
def _read_only_option(text: str, example: Example, task: Task) -> Any | None:
    """the only capital letter among the words, else the only option whose text occurs (HR-Bench and
    VLMEvalKit, matching_util.py, without its language model)"""
    answer, options = unwrap(text), example.answer.get("options", ())
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
    letters = [letter for letter in ascii_uppercase[: len(options)] if letter in words]
    if len(letters) == 1:
        return task.parse(letters[0], example)
    if not letters and "Z" in words:  # its sign for no option
        return None
    found = [n for n, option in enumerate(options) if option.lower() in answer.lower()]
    return found[0] if len(found) == 1 else None


def begins_word(text: str) -> bool:
    """Return whether the letter that ``first_letter`` reads is the first of a word.

    >>> begins_word("Based on the image"), begins_word("(B) dog")
    (True, False)
    """
    return re.match(r"[(\s]*[A-Za-z]{2}", unwrap(text)) is not None


@_reader
def _read_last_boxed(text: str, example: Example, task: Task) -> str | None:
    r"""the last \boxed{}, or 'The answer is "…".', or the output without thinking and tags
    (MathVista, extract_answer.py, without its language model)"""
    answer = unwrap(text)
    _, boxed, rest = answer.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if boxed else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:place].strip()
    quoted = re.search(r'The answer is "(.*)"\.', answer)
    return quoted[1] if quoted else answer.strip()


@_reader
def _read_last_interval(text: str, example: Example, task: Task) -> tuple[float, float] | None:
    """the last two numbers joined by to or and, anywhere (Time-R1, evaluate.py)"""
    found = re.findall(r"(?<!\d)(\d++\.?+\d*+) (?:to|and) (\d++\.?+\d*+)", text)
    start, end = map(float, found[-1]) if found else (math.inf, math.inf)
    return (start, end) if math.isfinite(start + end) else None


_OBJECT = re.compile(
    r"\{[^{}]*\}|<\|object_ref_start\|>[^<]*<\|object_ref_end\|>\s*<\|box_start\|>[^<]*<\|box_end\|>"
    r"|<ref>[^<]*</ref>\s*<box>[^<]*</box>|(?:<loc\d{4}>){4}[^<;]*"
)


@_reader
def _read_objects(text: str, example: Example, task: Task) -> Any | None:
    """every object with a box and a label; those that cannot be read are left out"""
    answer = unwrap(text)
    items = _OBJECT.findall(answer)
    y_first = task.frame.y_first
    boxes: list[LabeledBox] = [
        box for item in items for box in parse_boxes(item, y_first=y_first) or ()
    ]
    named = [(box, " ".join(label.casefold().split())) for box, label in boxes if label]
    image = example.images[0]
    objects = [(task.frame.to_pixels(b, image.size, image.resized_size), n) for b, n in named]
    return tuple(objects) if objects or parse_boxes(answer) == [] else None
