"""Advantages of a step's groups, from the rewards of all ranks and the reference's penalties."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from groups import make_group

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.training import advantages as advantages_module
from vlm_grpo.training.advantages import Estimator, StepAdvantages, compute_advantages, has_spread
from vlm_grpo.training.batch import Rollout
from vlm_grpo.types import Group

UNSCALED = "objective.scale_rewards=none"
"""An advantage is then the total reward minus the mean of its group."""


def compute(
    groups: list[Group],
    penalties: list[torch.Tensor] | None = None,
    rank: int = 0,
    override: str = UNSCALED,
) -> StepAdvantages:
    accelerator: Any = SimpleNamespace(process_index=rank)
    settings = load_settings("quickstart", [override])
    rollout = Rollout(tuple(groups), {"exact": 2.0, "closeness": 1.0})
    scores = {} if penalties is None else {"penalties": torch.cat(penalties)}
    return compute_advantages(rollout, scores, Estimator.load(settings.objective), accelerator)


def make_counting_group(*rewards: tuple[float | None, float]) -> Group:
    return make_group(*({"exact": exact, "closeness": close} for exact, close in rewards))


def test_rewards_are_weighted():
    result = compute(
        [make_counting_group((1.0, 0.0), (0.0, 1.0)), make_counting_group((1.0, 1.0), (0.0, 0.0))]
    )
    assert result.own.tolist() == pytest.approx([0.5, -0.5, 1.5, -1.5])  # 2 · exact + closeness
    assert torch.equal(result.own, result.step.values)


def test_groups_with_equal_ids_of_examples_are_separate():
    """With resampling or few examples, one example may have several groups in a step."""
    result = compute(
        [make_counting_group((1.0, 0.0), (0.0, 0.0)), make_counting_group((0.0, 1.0), (0.0, 1.0))]
    )
    assert result.own.tolist() == pytest.approx([1, -1, 0, 0])
    assert result.step.zero_spread.tolist() == [False, True]


def test_penalties_are_subtracted_from_the_rewards():
    result = compute(
        [make_counting_group((1.0, 0.0), (1.0, 0.0))],
        [torch.tensor([0.2]), torch.tensor([0.6])],
    )
    assert result.own.tolist() == pytest.approx([0.2, -0.2])


def test_an_undefined_reward_makes_a_completion_unscorable():
    result = compute([make_counting_group((None, 1.0), (1.0, 0.0), (0.0, 0.0))])
    assert result.own.tolist() == pytest.approx([0, 1, -1])
    assert result.step.unscorable == 1


def test_a_rank_gets_the_advantages_of_its_groups(monkeypatch):
    """Rank 1 of two; its group must not be joined with one of rank 0, which has three groups."""
    sent: list[list[Any]] = []  # the rewards and the sizes of the groups of rank 0

    def gather(parts: list[Any], rank: int) -> list[Any]:
        if rank == 0:
            sent.append(parts)
            return parts
        return [*sent.pop(0), *parts]

    others = [((5.0, 0.0), (3.0, 0.0)), ((1.0, 0.0), (1.0, 0.0)), ((0.0, 0.0), (2.0, 0.0))]
    for rank, groups in enumerate([others, [((1.0, 0.0), (0.0, 0.0))]]):
        monkeypatch.setattr(advantages_module, "gather_object", partial(gather, rank=rank))
        made = [make_counting_group(*rewards) for rewards in groups]
        result = compute(made, rank=rank)
    assert result.own.tolist() == pytest.approx([1, -1])
    assert result.step.values.tolist() == pytest.approx([2, -2, 0, 0, -2, 2, 1, -1])
    assert result.step.zero_spread.tolist() == [False, True, False, False]


def test_a_rank_gets_the_advantages_of_its_tokens(monkeypatch):
    """Rank 1 of two, with an advantage per token: those of its own group, in order."""
    override = "objective.advantage_estimator=reinforce_plus_plus"
    rewards, penalties = ((5.0, 0.0), (3.0, 0.0)), [torch.tensor([0.5]), torch.tensor([0.1])]
    sent: list[Any] = []
    monkeypatch.setattr(advantages_module, "gather_object", lambda part: sent.extend(part) or part)
    compute([make_counting_group(*rewards)], penalties, override=override)
    monkeypatch.setattr(advantages_module, "gather_object", lambda part: [sent[0], *part])
    own = [torch.tensor([0.0]), torch.tensor([2.0])]
    result = compute([make_counting_group((1.0, 0.0), (0.0, 0.0))], own, 1, override)
    returns = torch.tensor([9.5, 5.9, 2.0, -2.0], dtype=torch.float64)  # 2 · exact − KL
    expected = (returns - returns.mean()) / returns.std()
    assert result.tokens is not None
    assert result.tokens.tolist() == pytest.approx(expected[2:].tolist())
    assert result.own.tolist() == pytest.approx(expected[2:].tolist())


def test_a_rank_without_groups_has_no_advantages():
    assert compute([]).own.shape == (0,)


def test_a_group_has_spread_if_its_advantages_are_not_zero():
    """Dynamic sampling replaces the groups whose advantages the update would find to be 0."""
    plain, weights = ObjectiveSettings(), {"a": 1.0, "b": 1.0, "shown": 0.0}
    rounded = make_group({"a": 0.1, "b": 0.2, "shown": 1}, {"a": 0.3, "b": 0.0, "shown": 2})
    assert 0.1 + 0.2 != 0.3  # one total, rounded twice; a reward of weight 0 is ignored
    assert not has_spread(rounded, weights, plain)
    assert has_spread(make_group({"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 0.0}), weights, plain)
    assert not has_spread(make_group({"a": 1.0, "b": 0.0}, {"a": None, "b": 0.0}), weights, plain)
    # Equal totals of unequal rewards have no spread, unless each reward is normalized.
    swapped = make_group({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
    assert not has_spread(swapped, weights, plain)
    each = ObjectiveSettings(normalize_each_reward=True)
    assert has_spread(swapped, weights, each)
    assert not has_spread(make_group({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}), weights, each)
