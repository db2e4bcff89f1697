"""Alarms: none on a run that went well, one for each way of going wrong, each told once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from vlm_grpo.tracking.alarms import RULES, SHORT, WINDOW, Alarm, Health, Row, Trained

TRAINED = Trained({"exact": 1.0, "format": 0.2}, "exact", 100)
STEPS = 80


def healthy(step: int) -> dict[str, float]:
    """A run that learns: accuracy 0.3 to 0.7, format nearly always earned."""
    done = step / STEPS
    return {
        "step": step,
        "reward": 0.5 + 0.4 * done,
        "frac_reward_zero_std": 0.1 + 0.4 * done,
        "completions/mean_length": 30.0,
        "completions/clipped_ratio": 0.01,
        "entropy": 0.5 - 0.3 * done,
        "kl": 0.1 * done,
        "sampling/sampling_logp_difference/mean": 2e-3,
        "rewards/exact/mean": 0.3 + 0.4 * done,
        "rewards/exact/std": 0.45,
        "rewards/exact/failed": 0,
        "rewards/format/mean": 0.95,
        "rewards/format/std": 0.2,
        "rewards/format/failed": 0,
    }


def alarms(rows: list[dict[str, float]], trained: Trained = TRAINED) -> list[Alarm]:
    health = Health(trained)
    return [alarm for step, row in enumerate(rows) for alarm in health.step(step, row)]


def run(**changes: Callable[[float], float]) -> list[dict[str, float]]:
    """The healthy run with some metrics replaced by functions of how far it is, 0 to 1."""
    rows = [healthy(step) for step in range(STEPS)]
    for name, value in changes.items():
        for step, row in enumerate(rows):
            row[name] = value(step / STEPS)
    return rows


def test_a_recorded_quickstart_raises_nothing() -> None:
    lines = (Path(__file__).parents[1] / "recorded" / "quickstart.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 200  # the recipe's steps; exact rose from 0.46 to 0.83 in them
    # 32 prompts with 8 completions each.
    assert alarms(rows, Trained({"exact": 1.0}, "exact", 256)) == []


def test_a_run_that_learns_raises_nothing() -> None:
    assert alarms(run()) == []


COLLAPSES: dict[str, dict[str, Callable[[float], float]]] = {
    "groups without a spread": {"frac_reward_zero_std": lambda t: min(1.0, 0.1 + 1.5 * t)},
    "length drift": {"completions/mean_length": lambda t: 30 + 100 * t},
    "cut off": {"completions/clipped_ratio": lambda t: t},
    "entropy collapse": {"entropy": lambda t: 0.5 * math.exp(-8 * t)},
    "KL blow-up": {"kl": lambda t: 0.01 * math.exp(10 * t)},
    "one reward dominates": {
        "rewards/exact/mean": lambda t: 0.01,
        "rewards/exact/std": lambda t: 0.01 * (1 - t),
        "rewards/format/mean": lambda t: 0.5,
    },
    "rewards diverge": {
        "rewards/exact/mean": lambda t: 0.6 - 0.4 * t,
        "rewards/format/mean": lambda t: 0.5 + 0.4 * t,
    },
    "sampler mismatch": {"sampling/sampling_logp_difference/mean": lambda t: 0.2 * t},
    "reward fails": {"rewards/format/failed": lambda t: 30 * t},
}


def test_every_rule_has_its_collapse() -> None:
    assert set(COLLAPSES) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_is_told_once_with_its_remedy(name: str) -> None:
    found = alarms(run(**COLLAPSES[name]))
    assert [alarm.name for alarm in found] == [name]
    alarm = found[0]
    assert 0 < alarm.step < STEPS
    assert alarm.message
    assert alarm.remedy
    assert "nan" not in alarm.message


def test_shrinking_is_a_drift_too_and_a_few_tokens_are_none() -> None:
    shrinking = run(**{"completions/mean_length": lambda t: 60 - 50 * t})
    assert [alarm.name for alarm in alarms(shrinking)] == ["length drift"]
    # From 2 to 8 tokens: four times as many, but a count of "12" for "3" is no drift.
    assert alarms(run(**{"completions/mean_length": lambda t: 2 + 6 * t})) == []


def test_format_that_rises_with_accuracy_is_no_alarm() -> None:
    assert alarms(run(**{"rewards/format/mean": lambda t: 0.5 + 0.4 * t})) == []


def test_a_dominating_reward_is_fine_where_the_others_are_earned() -> None:
    # format is always earned and has no spread left: all of it is exact's.
    rows = run(**{"rewards/format/mean": lambda t: 1.0, "rewards/format/std": lambda t: 0.0})
    assert alarms(rows) == []


def test_a_mismatch_that_is_corrected_is_meant() -> None:
    rows = run(**COLLAPSES["sampler mismatch"])
    for row in rows:
        row["sampling/importance_sampling_ratio/mean"] = 1.0
    assert alarms(rows) == []


def test_an_alarm_is_raised_again_only_after_it_was_over() -> None:
    def told(*levels: float) -> list[int]:
        """Steps of alarms where each level of cut-off completions lasts two windows."""
        rows = [healthy(0) for _ in range(2 * WINDOW * len(levels))]
        for step, row in enumerate(rows):
            row["completions/clipped_ratio"] = levels[step // (2 * WINDOW)]
        return [alarm.step // (2 * WINDOW) for alarm in alarms(rows)]

    # 0.25 raises and 0.15 clears: between them neither happens.
    assert told(0.0, 0.3, 0.2, 0.3) == [1]
    assert told(0.0, 0.3, 0.1, 0.3) == [1, 3]


def test_a_failing_reward_is_told_within_a_few_steps() -> None:
    (alarm,) = alarms(run(**{"rewards/exact/failed": lambda t: 100}))
    assert alarm.step < SHORT
    assert "exact failed on 100.0%" in alarm.message


@pytest.mark.parametrize("value", [math.nan, None, "odd"])
def test_numbers_that_are_none_raise_nothing_and_break_nothing(value: object) -> None:
    rows: list[Row] = [dict.fromkeys(healthy(step), value) for step in range(STEPS)]
    health = Health(TRAINED)
    names = [alarm.name for step, row in enumerate(rows) for alarm in health.step(step, row)]
    assert names == []


def test_what_is_kept_does_not_grow() -> None:
    health = Health(TRAINED)
    for step in range(500):
        health.step(step, healthy(step % STEPS))
    assert len(health.history.first) == len(health.history.last) == WINDOW
