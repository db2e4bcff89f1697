"""Advantages from rewards: groups by id, groups without spread, unscorable completions, scales."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vlm_grpo.training.objective import advantages
from vlm_grpo.training.objective.advantages import STEP_ESTIMATORS, group_advantages

NAN = math.nan


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("estimator", list(advantages.ADVANTAGE_ESTIMATORS))
def test_groups_without_spread_have_advantage_zero(scale_rewards, estimator):
    """Groups of one, of one scorable completion, of none, and of equal rewards; no NaN anywhere."""
    rewards = double(0.3, 0.7, NAN, NAN, NAN, 0.1 + 0.2, 0.3, 1, 0)
    ids = ["one", "scorable", "scorable", "none", "none", "equal", "equal", "live", "live"]
    result = group_advantages(rewards, ids, estimator=estimator, scale_rewards=scale_rewards)
    assert result.values[:7].tolist() == [0.0] * 7
    assert result.values[7] == -result.values[8] > 0
    assert result.zero_spread.tolist() == [True, True, True, True, False]
    assert result.frac_reward_zero_std == 0.8
    assert result.group_stds[:4].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("rewards", "expected"), [((1e-7, 2e-7), (-0.5e-7, 0.5e-7)), ((3 * 100.1, 300.3), (0, 0))]
)
def test_rewards_that_differ_by_rounding_count_as_equal(rewards, expected):
    """It is relative to the rewards: 6e-14 is rounding of 300.3, and 1e-7 is a spread of 1e-7."""
    result = group_advantages(double(*rewards), "aa", scale_rewards="none")
    assert rewards[0] != rewards[1]
    assert result.zero_spread.tolist() == [expected == (0, 0)]
    assert result.values.tolist() == pytest.approx(expected, abs=0)


def test_rewards_normalized_one_by_one_are_described_by_their_weighted_sums_and_need_a_weight():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    found = advantages.per_reward_advantages(rewards, double(2, 0.5), "aaaa").group_stds
    assert found.tolist() == pytest.approx([double(2, 0.5, 2.5, 0.5).std().item()])
    # A completion that lacks only the value of a reward of weight 0 can be scored.
    rewards = torch.tensor([[1.0, NAN], [0.0, 1.0]], dtype=torch.float64)
    assert advantages.per_reward_advantages(rewards, double(1, 0), "aa").unscorable == 0
    half = advantages.per_reward_advantages(rewards, double(1, 1), "aa")
    assert half.unscorable == 1
    assert half.values.tolist() == [0.0, 0.0]


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="2 rewards but 1 group ids"):
        group_advantages(double(0, 1), ["a"])
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(double(0, math.inf), "aa")
    with pytest.raises(ValueError, match="group, batch or none"):
        group_advantages(double(0, 1), "aa", scale_rewards="std")
    with pytest.raises(ValueError, match="choose grpo or rloo"):
        group_advantages(double(0, 1), "aa", estimator="gae")


REWARD = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.3, 1.0]), st.floats(-5, 5))
REWARDS = st.lists(st.tuples(st.sampled_from("abc"), REWARD), min_size=1, max_size=12)


@given(REWARDS, st.randoms(), st.sampled_from(["group", "batch", "none"]))
def test_properties_of_any_batch(rows, random, scale_rewards):
    """Finite, centered in each group, ordered as the rewards, independent of the rows' order."""
    ids = [group for group, _ in rows]
    rewards = double(*[NAN if value is None else value for _, value in rows])
    result = group_advantages(rewards, ids, scale_rewards=scale_rewards)
    assert torch.isfinite(result.values).all()
    for number, name in enumerate(dict.fromkeys(ids)):  # in order of first appearance
        members = torch.tensor([group == name for group in ids]) & result.scorable
        # No advantage exceeds 5/1e-4 in size: 1e-9 is rounding.
        assert abs(result.values[members].sum()) < 1e-9
        if not result.zero_spread[number]:
            best, worst = rewards[members].argmax(), rewards[members].argmin()
            assert result.values[members][best] > result.values[members][worst]
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = [ids[i] for i in order]
    shuffled = group_advantages(rewards[order], shuffled, scale_rewards=scale_rewards)
    assert torch.allclose(shuffled.values, result.values[order], atol=1e-9)
    assert shuffled.frac_reward_zero_std == result.frac_reward_zero_std


LENGTHS, GROUPS = torch.tensor([3, 1, 2, 4]), torch.tensor([0, 0, 1, 1])
PENALTIES = [double(0.1, 0.2, 0.3), double(0.5), double(0.0, -0.4), double(0.1, 0.0, 0.2, 0.1)]


def normalize_tokens(returns: list[list[float]]) -> list[list[float]]:
    tokens = [value for row in returns for value in row]
    mean = statistics.fmean(tokens)
    scale = math.sqrt(statistics.variance(tokens) + 1e-8)
    return [[(value - mean) / scale for value in row] for row in returns]


@pytest.mark.parametrize(("name", "means"), [("", (0.0, 0.0)), ("_baseline", (0.5, 2.0))])
def test_reinforce_plus_plus_normalizes_returns_over_all_tokens(name, means):
    rewards = [1.0, 0.0, 3.0, 1.0]
    estimator = STEP_ESTIMATORS[f"reinforce_plus_plus{name}"]
    result: Any = advantages.step_advantages(
        double(*rewards), GROUPS, LENGTHS, estimator, PENALTIES
    )
    centered = [reward - means[row // 2] for row, reward in enumerate(rewards)]
    expected = normalize_tokens(
        [
            [value - sum(penalty[place:]) for place in range(len(penalty))]
            for value, penalty in zip(centered, (p.tolist() for p in PENALTIES), strict=True)
        ]
    )
    for found, values in zip(result.tokens, expected, strict=True):
        assert found.tolist() == pytest.approx(values)
    assert result.values.tolist() == pytest.approx([statistics.fmean(row) for row in expected])
    without = advantages.step_advantages(double(*rewards), GROUPS, LENGTHS, estimator)
    repeated = [[value] * length for value, length in zip(centered, LENGTHS.tolist(), strict=True)]
    assert without.tokens is None
    assert without.values.tolist() == pytest.approx([r[0] for r in normalize_tokens(repeated)])


def test_step_estimators_leave_out_unscorable_completions():
    estimator = STEP_ESTIMATORS["reinforce_plus_plus_baseline"]
    rewards = double(1, NAN, 3, 1)
    found: Any = advantages.step_advantages(rewards, GROUPS, LENGTHS, estimator, PENALTIES)
    kept = [0, 2, 3]
    rest = estimator, [PENALTIES[row] for row in kept]
    alone: Any = advantages.step_advantages(rewards[kept], GROUPS[kept], LENGTHS[kept], *rest)
    assert found.tokens[1].tolist() == [0.0]
    assert [found.tokens[row].tolist() for row in kept] == [row.tolist() for row in alone.tokens]
    nothing = advantages.step_advantages(double(NAN, NAN, NAN, NAN), GROUPS, LENGTHS, estimator)
    assert nothing.values.tolist() == [0.0] * 4
