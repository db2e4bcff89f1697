"""The task ``numeric``: reading numbers, units and texts (``tests/conformance/numeric*.jsonl``)."""

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from vlm_grpo.task.registry import load_task
from vlm_grpo.tasks.numeric import parse_quantity
from vlm_grpo.types import Example

PIECES = [
    *("12", "1,234", ".5", "-", "$", "€", "%", " ", "million", "k", "or", "e9", "×10^3", "km", ".")
]
READ = {
    **{"USD 5": (5, "$"), "5 USD": (5, "$"), "US$5bn": (5e9, "$"), "5 m": (5, "m")},
    **{"-£5": (-5, "£"), "£-5": (-5, "£"), "+.5 percent": (0.5, "%"), "5. %": (5, "%")},
    **{"12 million people": (12e6, "people"), "5 km²": (5, "km²"), "5 kgs": (5, "kg")},
    **{"5M": (5e6, ""), "٣": (3, ""), "Twenty-two": (22, ""), "1.2e-3": (0.0012, "")},
}


def score(gold, text: str, question: str = "?", **options) -> float:
    task = load_task("numeric", **options)
    return task.score(text, Example("1", (), question, gold)).rewards["relaxed"] or 0.0


def test_a_number_with_a_unit_is_read_and_other_texts_are_no_number():
    assert {text: parse_quantity(text) for text in READ} == READ
    others = ["", "5-6", "1st", "4G", "three apples", "One Direction", "$5 people", "€5 USD"]
    assert [text for text in (*others, "²", "5 2") if parse_quantity(text) is not None] == []


@settings(max_examples=200, deadline=None)
@example("12 millionmillion")
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join))
def test_a_number_is_finite_and_its_text_earns_its_own_reward(text):
    found = parse_quantity(text)
    if found is None:
        return
    assert math.isfinite(found.value)
    assert score(text, text) == 1.0
    # A gold answer without a unit fits any unit that the question names, and some others.
    assert score(found.value, text, f"How many {found.unit}?", exact_years=False) == 1.0
    if found.unit in ("", *PIECES):
        assert score(found.value, text, exact_years=False) == 1.0


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0.0, 0.05, 0.3]))
def test_the_tolerance_is_relative_to_the_gold_answer(gold, tolerance):
    near, far = gold * (1 + 0.99 * tolerance), gold * (1 + 1.01 * tolerance) + (gold == 0)
    if all(map(math.isfinite, (near, far))) and not 0 < abs(gold) < 1e-300:
        assert score(gold, repr(near), tolerance=tolerance, exact_years=False) == 1.0
        if tolerance:
            assert score(gold, repr(far), tolerance=tolerance, exact_years=False) == 0.0
