"""Parsers: accepted and rejected forms, robustness against any text, and linear time."""

import re
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_grpo.task import parsing
from vlm_grpo.task.parsing import MAX_CHARACTERS, MAX_ITEMS, parse_boxes, parse_integer
from vlm_grpo.task.sentences import unwrap

COORDINATES = st.floats(-parsing.MAX_COORDINATE, parsing.MAX_COORDINATE).map(lambda v: round(v, 3))
PARSERS = {
    "extract_answer with tags": lambda text: parsing.extract_answer(text, tags=True),
    "extract_answer": lambda text: parsing.extract_answer(text, tags=False),
    **{"integer": parse_integer, "boxes": parse_boxes, "points": parsing.parse_points},
}


def test_an_answer_has_no_white_space_around_it_and_is_none_without_a_letter():
    assert parsing.extract_answer("<answer> a\n</answer>", tags=True) == "a"
    assert parsing.extract_answer(" \n\t", tags=False) is None


WRAPPED = {
    **{"**Answer:** $\\boxed{\\text{B}}$.": "B", "# Final answer\n\nB": "B", "\\(12\\)": "12"},
    **{'```json\n{"answer": "B"}\n```': "B", "The final answer is: **14**": "14"},
    "```13 12```": "13 12",  # its first word is no name of a language
}
WHOLE = ['"a" or "b"', "\\boxed{a} or \\boxed{b}", '{"answer": 1, "other": 2}', "answer"]


@pytest.mark.parametrize(("text", "inner"), [*WRAPPED.items(), *zip(WHOLE, WHOLE, strict=True)])
def test_what_stands_around_an_answer_is_taken_off(text, inner):
    assert unwrap(text) == inner
    assert unwrap(inner) == inner


def test_number_words_are_parsed():
    units = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    teens = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    for join in ("-", " "):
        compounds = [[ten, *(f"{ten}{join}{unit}" for unit in units[1:])] for ten in tens]
        words = [*units, *teens.split(), *(word for ten in compounds for word in ten)]
        assert [parse_integer(word) for word in words] == list(range(100))


@given(st.integers(0, 10**18 - 1))
def test_written_integers_are_parsed(number):
    assert parse_integer(str(number)) == number
    assert parse_integer(f"{number:,} apples") == number
    assert parse_integer(f"-{number}") is None
    assert parse_integer(f"{number}.5") is None
    assert parse_integer(f"{number}.0") == number
    assert parse_integer(f"{number} ({number})") == number
    for form in ("{} or {}", "{} ({})", "{}: {}", "{}, {}", "{} {}", "{}; {}"):
        assert parse_integer(form.format(number, number + 1)) is None


@given(st.integers(1, 999), st.integers(1, 999), st.integers(0, 1998))
def test_a_breakdown_must_add_up(first, second, total):
    right = total == first + second or total == first == second
    text = f"{total} dogs: {first} black and {second} white"
    assert parse_integer(text) == (total if right else None)
    total = first + second
    assert parse_integer(f"{total} dogs, {first} black and {second} white") is None
    assert parse_integer(f"{total} dogs ({first} black, {second} white)") == total


@given(COORDINATES, COORDINATES, COORDINATES, COORDINATES)
def test_four_numbers_are_a_box_if_it_has_an_area(x1, y1, x2, y2):
    expected = [((x1, y1, x2, y2), None)] if x1 < x2 and y1 < y2 else None
    plain = [f"{value:.3f}" for value in (x1, y1, x2, y2)]
    assert parse_boxes(f"[{', '.join(plain)}]") == expected
    token = f"<|box_start|>({plain[0]},{plain[1]}),({plain[2]},{plain[3]})<|box_end|>"
    assert parse_boxes(token) == expected
    assert parsing.parse_points(f"[{plain[0]}, {plain[1]}]") == [(x1, y1)]


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 2000))
def test_only_the_size_of_the_prompt_may_be_repeated(w, h, x, y):
    units = f"in pixels of the {w}x{h} image"
    parsed = parse_boxes(f"In the {x}x{y} image: [1, 2, 3, 4]", units)
    assert parsed == ([((1, 2, 3, 4), None)] if (x, y) == (w, h) else None)
    assert parse_boxes(f"In the {w} × {h} image: (1, 2, 3, 4)", units) == [((1, 2, 3, 4), None)]
    assert parse_boxes(f"In the {w}x{h} image: (1, 2, 3, 4)") is None
    assert parsing.parse_points(f"{w}x{h}: [1, 2]", units) == [(1, 2)]


MALFORMED = [
    *('{"bbox_2d": [1, 2, 3, 4], "label": ["a", "b"]}', "<box>[[1,2,1,4]]</box>", "<box></box>"),
    *("<box>cat</box>", "<|box_start|>(1,2),(3,x)<|box_end|>", "<|box_start|>(1,2)<|box_end|>"),
    *("<loc1><loc1><loc2><loc2>", "<loc0001><loc0001><loc0002><loc0002> 3 <loc"),
]


def test_malformed_boxes_are_rejected():
    assert [text for text in MALFORMED if parse_boxes(text) is not None] == []


def test_the_number_of_boxes_is_limited_in_every_grammar():
    for one, between in (
        *(("[1,2,3,{}]", ","), ("<box>[[1,2,3,{}]]</box>", "")),
        ("<|box_start|>(1,2),(3,{})<|box_end|>", ""),
        ("<loc0001><loc0001><loc{:04}><loc0002>", ";"),
    ):
        items = [one.format(number + 3) for number in range(MAX_ITEMS + 1)]
        texts = [between.join(items[:count]) for count in (MAX_ITEMS, MAX_ITEMS + 1)]
        most, over = (f"[{text}]" if one.startswith("[") else text for text in texts)
        assert len(parse_boxes(most) or []) == MAX_ITEMS
        assert parse_boxes(over) is None
    half = f"<box>[{','.join(['[1,2,3,4]'] * (MAX_ITEMS // 2 + 1))}]</box>"
    assert parse_boxes(half) is not None
    assert parse_boxes(half + half.replace("1", "0")) is None


def test_the_length_of_an_answer_is_limited():
    padding = " " * (MAX_CHARACTERS - len("[1,2,3,4]"))
    assert parse_boxes("[1,2,3,4]" + padding) is not None
    assert parse_boxes("[1,2,3,4]" + padding + " ") is None
    assert parse_integer("3" + " " * 999) == 3
    assert parse_integer("3" + " " * 1000) is None


N = 100_000
REPEATED = (
    *("[", '{"a":', "1", " ", "'", "-", "\x00", "( ", "1 ", "1 (", "[] ", "three ", "640 x 480 "),
    *("<answer>", "<answer></answer>", "<answ", "<think>", "<loc0001>", "<box>", "<|box_start|>"),
    *("<loc0001><loc0001><loc0002><loc0002>;", "<box>[[1,2,3,4]]</box>", "(1,2,3,4)", "(1,2,3,"),
    *("<|box_start|>(1,2),(3,4)<|box_end|>", "[1,2,3,4] ", "a\u0300"),
    "\ufdfa",  # one character that expands to 18
)
ADVERSARIAL = [
    *(piece * (N // len(piece)) for piece in REPEATED),
    *(piece * min(MAX_ITEMS, MAX_CHARACTERS // len(piece)) for piece in REPEATED),
    "[" * (MAX_CHARACTERS // 2) + "]" * (MAX_CHARACTERS // 2),
    '{"bbox":' * 900 + "[1,2,3,4]" + "}" * 900,
    '["a",' * 900 + "[1,2,3,4]" + "]" * 900,
    '{"a":' * 3000 + "1" + "}" * 3000,
    *(f"[{number},2,3,4]" for number in ("1" * 19_000, "1." + "1" * 19_000, "1e" + "1" * 19_000)),
    "[NaN, NaN, NaN, NaN]",
    "[-Infinity, 1, Infinity, 2]",
    "\n" * N + "3",
    "<ref>" * 3900 + "<box>",
    "<|box_start|>" + "<|object_ref_start|>" * 900,
    *(f"[{','.join(['[1,2,3,4]'] * count)}]" for count in (MAX_ITEMS, 1900)),
    "[" + ",".join(["[1,2]"] * MAX_ITEMS) + "]",
    "[" + ",".join(["1"] * 9000) + "]",
    "[[" + ",".join(["1"] * 9000) + "]]",
    '["' + "\\" * 19_000 + '"]',
    '["' + "\\ud800" * 3000 + '"]',
    "1" + ",111" * 240,
    "no " * 330 + "3",
]


@pytest.mark.no_cover  # traced, a parser takes three times as long
@pytest.mark.parametrize("parser", PARSERS.values(), ids=list(PARSERS))
def test_adversarial_texts_take_linear_time(parser):
    for text in ADVERSARIAL:
        # Also truncated to the limits, where the real work begins.
        for version in (text, text[:MAX_CHARACTERS], text[:1000]):
            assert measure_scans(parser, version) < MAX_SCANS, text[:80]


MAX_SCANS = 15
"""Allowed CPU time of a parser in scans of a long text (about 0.7 ms each). The slowest pair takes
6 scans; quadratic time would take thousands."""
LONG_TEXT = "word 12, (3) " * (MAX_CHARACTERS // 13)


def scan(text: str) -> int:
    """Do the least that reading a text takes: normalize it and find its words."""
    return len(re.findall(r"(?<!\w)\w+", unicodedata.normalize("NFKC", text).lower()))


def measure_scans(parser, text: str) -> float:
    """Return a parser's CPU time for a text as a multiple of one scan, at the fastest attempts.

    Other load only adds time, and a slower machine slows both.
    """
    parsing = scanning = float("inf")
    for _ in range(20):
        parsing = min(parsing, measure(parser, text))
        scanning = min(scanning, measure(scan, LONG_TEXT))
        if parsing < MAX_SCANS * scanning:
            break
    return parsing / scanning


def measure(function, text: str) -> float:
    start = time.thread_time()
    function(text)
    return time.thread_time() - start
