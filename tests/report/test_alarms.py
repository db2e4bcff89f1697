"""No alarms on a run that goes well, and one alarm for each kind of failure."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlm_grpo.report.alarms import CONDITIONS, SHORT, WINDOW, AlarmMonitor, Row
from vlm_grpo.utils.jsonl import read_rows

RECORDED = Path(__file__).parents[1] / "recorded"
WEIGHTS = {"exact": 1.0, "format": 0.2}
STEPS = 80


def healthy(step: int) -> dict[str, float]:
    """A step of a run that learns: accuracy 0.3 to 0.7, format nearly always earned."""
    done = step / STEPS
    return {
        "step": step,
        "reward": 0.5 + 0.4 * done,
        "frac_reward_zero_std": 0.1 + 0.4 * done,
        "completions/mean_length": 30.0,
        "completions/clipped_ratio": 0.01,
        "entropy": 0.5 - 0.3 * done,
        "learning_rate": 1e-6,
        "kl": 0.1 * done,
        "sampling/sampling_logp_difference/mean": 2e-3,
        "rewards/exact/mean": 0.3 + 0.4 * done,
        "rewards/exact/std": 0.45,
        "rewards/exact/failed": 0,
        "rewards/format/mean": 0.95,
        "rewards/format/std": 0.2,
        "rewards/format/failed": 0,
    }


def collect_alarms(
    rows: Sequence[Row],
    weights: dict[str, float] = WEIGHTS,
    metric: str = "exact",
    completions: int = 100,
    **facts: Any,
) -> list[Any]:
    """Return the alarms, each with the step in which it is raised."""
    monitor = AlarmMonitor(weights, metric, completions, **facts)
    alarms = [
        SimpleNamespace(step=i, **a) for i, row in enumerate(rows) for a in monitor.update(row)
    ]
    assert max(len(monitor.first), len(monitor.last)) <= WINDOW  # what it keeps does not grow
    return alarms


def make_rows(**changes: Callable[[float], float]) -> list[dict[str, float]]:
    """The healthy run with some metrics replaced by functions of its progress, 0 to 1."""
    return [
        healthy(step) | {name: value(step / STEPS) for name, value in changes.items()}
        for step in range(STEPS)
    ]


def test_a_recorded_quickstart_raises_nothing_and_with_too_large_a_rate_it_collapses():
    rows = read_rows(RECORDED / "quickstart.jsonl")
    assert len(rows) == 200  # the recipe's steps; exact rose from 0.46 to 0.83 in them
    # 32 prompts with 8 completions each.
    assert collect_alarms(rows, {"exact": 1.0}, completions=256) == []
    # With 15 times its rate, held-out answers are worse before the mean over 20 steps of the
    # sampled ones is, and that is no overfitting.
    before: Row = {"mean_token_accuracy": 0.9, "eval/exact": 0.6}  # a value of the loaded model
    rows = [before, *read_rows(RECORDED / "too_large_rate.jsonl")]
    (alarm,) = collect_alarms(rows, {"exact": 1.0}, completions=256)
    assert (alarm.name, alarm.step) == ("collapse", 12)
    assert "after learning rates of up to 0.0018 (optim.lr)" in alarm.message


FAILURES: dict[str, dict[str, Callable[[float], float]]] = {
    "collapse": {"rewards/exact/mean": lambda t: 0.6 * (t < 0.3)},
    "overfitting": {"rewards/exact/mean": lambda t: 0.3 + 0.7 * t, "eval/exact": lambda t: 0.4},
    "reward without accuracy": {
        "rewards/exact/mean": lambda t: 0.3,
        "reward": lambda t: 0.4 + 0.7 * t,
        "eval/exact": lambda t: 0.3,
    },
    "groups without a reward": {
        "frac_reward_zero_std": lambda t: 1.0,
        "reward": lambda t: 0.02,
        "completions/answered": lambda t: 0.05,
    },
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
        "rewards/exact/mean": lambda t: 0.6 - 0.3 * t,
        "rewards/format/mean": lambda t: 0.5 + 0.4 * t,
    },
    "sampler mismatch": {"sampling/sampling_logp_difference/mean": lambda t: 0.2 * t},
    "reward fails": {"rewards/format/failed": lambda t: 30 * t},
    "no calls": {"tools/calls": lambda t: 1.5 * (t < 0.5)},
    "calls fail": {"tools/errors": lambda t: t},
    "shortcut": {"visual_credit/gain_without_object": lambda t: 0.3 * t},
}


def test_every_rule_has_its_failure():
    assert list(FAILURES) == list(CONDITIONS)


def test_a_shortcut_needs_ten_gains_three_standard_errors_above_zero():
    for spread, steps, count in ((0.09, 10, 1), (0.11, 10, 0), (0.01, 9, 0)):
        gains = [0.1 + spread * (-1) ** n for n in range(steps)]  # of ten, a third is the error
        rows = [{"visual_credit/gain_without_object": gain} for gain in gains]
        assert [alarm.name for alarm in collect_alarms(rows)] == ["shortcut"] * count


@pytest.mark.parametrize(
    ("name", "changes"),
    [*FAILURES.items(), ("length drift", {"completions/mean_length": lambda t: 60 - 50 * t})],
)
def test_a_failure_raises_one_alarm_with_a_remedy(name, changes):
    rows: list[Row] = [*make_rows(**changes)]
    (alarm,) = collect_alarms(rows)
    assert alarm.name == name
    assert 0 < alarm.step < STEPS
    assert all((alarm.message, alarm.remedy))
    assert "nan" not in alarm.message
    # Supervised steps have no samples: every mean begins with the first rollout.
    supervised: list[Row] = [{"loss": 2.0, "mean_token_accuracy": 0.1}] * WINDOW
    alarm.step += WINDOW
    assert collect_alarms([*supervised, *rows]) == [alarm]


HEALTHY: dict[str, dict[str, Callable[[float], float]]] = {
    "a run that learns": {},
    "format rises with accuracy": {"rewards/format/mean": lambda t: 0.5 + 0.4 * t},
    # format is always earned and has no spread left: all of the spread is exact's.
    "a reward dominates because the other is earned": {
        "rewards/format/mean": lambda t: 1.0,
        "rewards/format/std": lambda t: 0.0,
    },
    "a mismatch is corrected": {
        **FAILURES["sampler mismatch"],
        "sampling/importance_sampling_ratio/mean": lambda t: 1.0,
    },
    "right answers gain without the object in few steps": {
        "visual_credit/gain_without_object": lambda t: 0.5 * math.sin(1e4 * t),
    },
    "the held-out examples are harder": {"eval/exact": lambda t: 0.1 + 0.2 * t},
    "sampled answers become certain": {
        "rewards/exact/mean": lambda t: 0.3 + 0.6 * t,
        "eval/exact": lambda t: 0.7 + 0.2 * t,
    },
    # Greedy answers were right before: only the sampled ones improve.
    "held-out answers are right from the beginning": {
        "reward": lambda t: 0.4 + 0.7 * t,
        "eval/exact": lambda t: 0.95,
    },
    # A reward of up to 10 whose weight is 1: its maximum is unknown.
    "a reward has another scale": {"reward": lambda t: 3 + 6 * t, "eval/exact": lambda t: 0.5},
    # From 2 to 8 tokens: four times as many, but a count of "12" for "3" is no drift.
    "lengths of a few tokens": {"completions/mean_length": lambda t: 2 + 6 * t},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_run_that_goes_well_raises_nothing(name):
    assert collect_alarms(make_rows(**HEALTHY[name])) == []


def test_a_mismatch_of_an_outside_sampler_is_measured_on_fresh_completions():
    """It is always corrected for, and completions of older weights are meant to differ."""

    def collect(staleness: list[int], truncates: bool = False) -> list[int]:
        outside = {"importance_sampling_ratio/mean": 1.0, "sampling_logp_difference/mean": 0.1}
        changes = {f"sampling/{name}": value for name, value in outside.items()}
        rows = [{**healthy(0), **changes, "staleness/max": steps} for steps in staleness]
        found = collect_alarms(rows, truncates=truncates)
        assert {alarm.name for alarm in found} <= {"sampler mismatch"}
        return [alarm.step for alarm in found]

    assert collect([0] * 10) == [2]  # the third of five rows
    assert collect([1] * 10) == []
    assert collect([0] + [1] * 40) == [1]  # the first step's are always fresh
    assert collect([0] * 10, truncates=True) == []


def test_an_alarm_is_raised_again_only_after_it_was_cleared():
    def raised_at(*levels: float) -> list[int]:
        """Return the positions of alarms if each share of truncated completions lasts 2 windows."""
        shares = [level for level in levels for _ in range(2 * WINDOW)]
        rows = [{**healthy(0), "completions/clipped_ratio": share} for share in shares]
        return [alarm.step // (2 * WINDOW) for alarm in collect_alarms(rows)]

    # 0.25 raises and 0.15 clears: between them neither happens.
    assert raised_at(0.0, 0.3, 0.2, 0.3) == [1]
    assert raised_at(0.0, 0.3, 0.1, 0.3) == [1, 3]


def test_values_that_are_not_numbers_raise_nothing():
    for value in (math.nan, None, "odd"):
        rows: list[Row] = [dict.fromkeys(healthy(step), value) for step in range(STEPS)]
        assert collect_alarms(rows) == []


def test_a_primary_metric_that_is_an_error_is_better_if_lower():
    """The format is learned while the answers get worse: the error rises from 0.5 to 1.5."""

    def messages(errors: list[float], lower_is_better: bool) -> str:
        rows: list[Row] = [
            {
                "metrics/absolute_error": error,
                "rewards/exact/mean": 0.5,
                "rewards/format/mean": 0.2 + 0.6 * step / len(errors),
            }
            for step, error in enumerate(errors)
        ]
        facts = {"metric": "absolute_error", "lower_is_better": lower_is_better}
        return "\n".join(alarm.message for alarm in collect_alarms(rows, completions=64, **facts))

    rising = [0.5] * 20 + [0.5 + step / 30 for step in range(31)]
    assert "absolute_error went from 0.50 to" in messages(rising, True)
    assert "absolute_error" not in messages(rising[::-1], True)
    assert "absolute_error" not in messages(rising, False)


def test_a_model_that_earns_nothing_is_told_how_to_begin_in_its_first_steps():
    changes = FAILURES["groups without a reward"]
    (alarm,) = collect_alarms(make_rows(**changes), recipe="runs/zero/config.yaml")
    assert alarm.step == 2  # three of the last five steps suffice
    assert "mean over 300 completions is 0.02, 5% of them have an answer" in alarm.message
    for command in ("train", "sft", "sample"):
        assert f"vlm-grpo {command} runs/zero/config.yaml" in alarm.remedy
    assert "warm_start.steps=" in alarm.remedy


def test_a_collapse_names_the_learning_rate_and_no_warm_start():
    """After the first update of a rate of 1, nothing is earned any more."""
    rows = make_rows(**FAILURES["groups without a reward"])[:9]
    for step, row in enumerate(rows):
        row["learning_rate"] = 1 - step / 9
        row["rewards/exact/mean"] = row["reward"] = 0.6 * (step == 0)
    (alarm,) = collect_alarms(rows)
    assert (alarm.name, alarm.step) == ("collapse", 2)
    assert "fell from 0.60 to 0.20 in the last 3 steps" in alarm.message
    assert "after learning rates of up to 1 (optim.lr)" in alarm.message
    rows = make_rows(**FAILURES["collapse"])  # long after the highest rate
    for step, row in enumerate(rows):
        row["learning_rate"] = 1 / (1 + step)
    (message,) = [alarm.message for alarm in collect_alarms(rows) if alarm.name == "collapse"]
    assert "after learning rates of up to 1 (optim.lr)" in message


def test_a_failing_reward_raises_an_alarm_within_a_few_steps_and_a_mean_after_half_a_window():
    (alarm,) = collect_alarms(make_rows(**{"rewards/exact/failed": lambda t: 100}))
    assert alarm.step < SHORT
    assert "exact failed on 100.0%" in alarm.message
    rows: list[Row] = [{**healthy(0), "frac_reward_zero_std": 1.0} for _ in range(10)]
    (alarm,) = collect_alarms(rows)
    assert alarm.step == 9
    assert "the groups of the last 10 steps have" in alarm.message
