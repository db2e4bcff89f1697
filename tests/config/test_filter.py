"""Filters of examples: what they accept, and texts that are none."""

import pytest

from vlm_grpo import UserError
from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.filter import Filter


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("0.1 < pass_rate < 0.9", [0.5]),
        ("0.1<=pass_rate<.9", [0.1, 0.5]),
        ("pass_rate != 0", [0.1, 0.5, 0.9]),
        ("pass_rate == 5e-1", [0.5]),
        ("pass_rate > 0 and pass_rate <= 0.5", [0.1, 0.5]),
        ("0 < pass_rate and 3 > n >= 2", [0.1, 0.5, 0.9]),
        ("pass_rate > -1 and n > 2", []),
    ],
)
def test_a_filter_compares_numbers(text, accepted):
    chosen = Filter(text)
    values = [0.0, 0.1, 0.5, 0.9]
    assert [v for v in values if chosen.accepts({"pass_rate": v, "n": 2})] == accepted


@pytest.mark.parametrize(
    "text",
    [
        *("", "pass_rate", "< 0.5", "pass_rate <", "pass_rate 0.5", "0.1 < 0.5", "a < b and"),
        *("a < 1 or a > 2", "a < 1 and and a > 0", "a = 1", "a.b < 1", "f(a) < 1", "a < 1; b"),
        *("__import__('os').system('x') < 1", "a < 'b'", "a < 1 2", "not a < 1"),
        *("a in b", "a is b", "-a < 1", "(a < 1) < b", "a < 1 and (b < 1 and c < 1)", "a < True"),
        *("-" * 500 + "1 < a", "(" * 500 + "a < 1" + ")" * 500, "a < 9**9", "a < 1j"),
    ],
)
def test_anything_else_is_refused_when_the_settings_are_read(text):
    with pytest.raises(UserError, match="is no filter: write comparisons"):
        DataSettings(train="rows.jsonl", filter=text)


@pytest.mark.parametrize("value", [True, float("nan"), "0.5", None])
def test_what_is_no_number_is_missing(value):
    chosen = Filter("rate > 0 and n < 3")
    assert chosen.find_missing({"rate": value, "n": 2}) == ["rate"]
    assert chosen.find_missing({"n": 2}) == ["rate"]
    assert chosen.find_missing({"rate": 0, "n": 2.5}) == []
