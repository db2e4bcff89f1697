"""Words around an answer: which of them deny it, and what is taken off around it."""

from __future__ import annotations

import re

import pytest

from vlm_grpo.task.sentences import Candidate, choose, is_sure, unwrap


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is 5.", "5"),
        ("What is it? 5", "5"),
        ("5, that is 5", "5"),
        ("5. Let me know if you need more, or something else.", "5"),
        ("5. No other number is visible.", "5"),
        ("The user asked for the number: 5", "5"),
        ("At most 5", "5"),  # a bound, for an answer that need not be exact
        *(
            (text, None)
            for text in ("", "five", "5 or 6", "5 6", "It is not 5.", "It isn’t 5", "5?")
        ),
        *(
            (text, None)
            for text in ("5 ｏｒ more", "5 o\u200br more", "~~5~~", "<!-- 5 -->", "5. Wait, no")
        ),
        *(
            (text, None)
            for text in ("The prompt asks for 5", "For example 5", "left of 5", "after 5")
        ),
        *(
            (text, None)
            for text in ("5 unless it is dark", "possibly 5", "all except 5", "5 is wrong")
        ),
        *((text, None) for text in ("Usually 5", "You told me 5", "People would say 5")),
        *((text, "5") for text in ("5. It is usually so.", "5, as told. If so, I count well.")),
    ],
)
def test_a_sentence_states_one_value_or_none(text, value):
    found = [Candidate(*place.span(), place[0]) for place in re.finditer(r"\d", text)]
    assert choose(text, found) == value


@pytest.mark.parametrize("words", ["at least |", "about |", "| dozen", "~|", "| or more", "|%"])
def test_an_exact_number_has_no_bound_and_no_estimate(words):
    found = [Candidate(words.index("|"), words.index("|") + 1, 5)]
    assert choose(words, found, exact=True) is None


def test_may_is_a_month_and_a_doubt():
    assert is_sure("in May |")
    assert not is_sure("it may be |")


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("**Answer:** $\\boxed{\\text{B}}$.", "B"),
        ("# Final answer\n\nB", "B"),
        ('```json\n{"answer": "B"}\n```', "B"),
        ("```13 12```", "13 12"),  # its first word is no name of a language
        ("The final answer is: **14**", "14"),
        ("\\(12\\)", "12"),
        ('"a" or "b"', '"a" or "b"'),
        ("\\boxed{a} or \\boxed{b}", "\\boxed{a} or \\boxed{b}"),
        ('{"answer": 1, "other": 2}', '{"answer": 1, "other": 2}'),
        ("answer", "answer"),
    ],
)
def test_what_stands_around_an_answer_is_taken_off(text, inner):
    assert unwrap(text) == inner
    assert unwrap(inner) == inner
