"""Metrics of charts and math, against values by hand and definitions written down again here."""

from __future__ import annotations

import random

import pytest

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.benchmarks.metrics import mathvista, relaxed_accuracy
from vlm_grpo.benchmarks.official import READERS
from vlm_grpo.types import Example


def define_relaxed(text: str, answer: str) -> bool:
    """Return ChartQA's relaxed accuracy, by its definition in exact terms."""
    values = []
    for side in (text, answer):
        digits = side
        while digits.endswith("%"):
            digits = digits[:-1]
        try:
            values.append(float(digits) * (0.01 if side.endswith("%") else 1.0))
        except ValueError:
            values.append(None)
    found, right = values
    if found is None or right is None or right == 0:
        return text.lower() == answer.lower()
    return abs(found / right - 1.0) <= 0.05 + 1e-12


NUMBERS = ["0", "1", "2", "20", "21", "19", "0.2", "0.21", "20%", "21%", "95", "100", "1e2", "-2"]
TEXTS = [
    "Yes",
    "yes",
    "NO",
    "",
    "%",
    "nan",
    "inf",
    "-inf",
    "20 %",
    "2%%",
    "20.",
    "1_0",
    " 20",
    "$2",
]


def test_relaxed_accuracy_is_its_definition() -> None:
    rng = random.Random(0)
    pairs = [(rng.choice(NUMBERS + TEXTS), rng.choice(NUMBERS + TEXTS)) for _ in range(1000)]
    assert {relaxed_accuracy(t, [a]) == define_relaxed(t, a) for t, a in pairs} == {True}
    assert 0.03 < sum(relaxed_accuracy(t, [a]) for t, a in pairs) / len(pairs) < 0.5


def test_relaxed_accuracy_takes_the_best_of_several_answers() -> None:
    assert relaxed_accuracy("43", ["Yes", "42"]) == 1.0


CHOICES = {"choices": ["145°", "B", "circle"], "answer_type": "text"}


@pytest.mark.parametrize(
    ("text", "answer", "meta", "expected"),
    [
        ("(A)", "145°", CHOICES, 1),
        ("(c) B", "circle", CHOICES, 1),  # the letter in brackets decides
        ("B", "B", CHOICES, 1),  # a letter alone is the second choice
        ("C.", "B", CHOICES, 1),  # neither a letter nor a choice: the nearest one
        ("a", "145°", CHOICES, 0),  # small letters only in brackets
        ("(Z)", "B", CHOICES, 1),  # no such option: the text nearest to "Z"
        ("circles", "circle", CHOICES, 1),
        ("12.9", "12", {"answer_type": "integer"}, 1),
        ("12 cm", "12", {"answer_type": "integer"}, 0),
        ("inf", "12", {"answer_type": "integer"}, 0),
        ("1.24", "1.2", {"answer_type": "float", "precision": 1}, 1),
        ("1.24", "1.24", {"answer_type": "float", "precision": 1}, 0),
        ("1.2", "1.2", {"answer_type": "float", "precision": 1.0}, 1),
        ("[1, 2]", "[1, 2]", {"answer_type": "list"}, 1),
        ("[1,2]", "[1, 2]", {"answer_type": "list"}, 0),
    ],
)
def test_mathvista(text: str, answer: str, meta: dict, expected: float) -> None:
    assert mathvista(text, answer, meta) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} or \boxed{ 3 }.", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ('It is 4. The answer is "4".', "4"),
        (r"<think>\boxed{1}</think> (B)", "(B)"),
        (r"\boxed{3", r"\boxed{3"),
    ],
)
def test_the_last_box_is_read(text: str, answer: str) -> None:
    task = load_benchmark("mathvista").load_task()
    example = Example("1", (), "?", "4")
    assert READERS["last_boxed"].read(text, example, task) == answer


@pytest.mark.parametrize(
    ("name", "answer", "meta", "text", "value"),
    [
        ("chartqa", "43", {"type": "human"}, "<think>x</think>42", 1),
        ("mathvista", "B", {**CHOICES, "precision": None}, r"so \boxed{B}", 1),
        ("mathverse", "D", {"version": "Text Lite"}, r"so \boxed{D}", 1),
        ("geometry3k", r"2 \sqrt { 3 }", {}, r"so \boxed{\sqrt{12}}", 1),
    ],
)
def test_benchmarks_score_an_output(name: str, answer: str, meta: dict, text: str, value) -> None:
    benchmark = load_benchmark(name)
    score = benchmark.load_task().score(text, Example("1", (), "?", answer, meta))
    assert {**score.rewards, **score.metrics}[benchmark.metric] == value
    assert score.failures == {}
