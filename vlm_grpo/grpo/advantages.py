"""From a step's scored groups to the advantages of its completions, on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.objective import Advantages, group_advantages, per_reward_advantages
from vlm_grpo.types import Group


def step_advantages(
    groups: Sequence[Group],
    reward_weights: Mapping[str, float],
    penalties: Tensor | None,
    objective: ObjectiveSettings,
    accelerator: Accelerator,
) -> tuple[Advantages, Tensor]:
    """Advantages of the step's completions on all ranks, and those of this rank alone.

    Args:
        groups: this rank's, n completions in all.
        reward_weights: by name; rewards of weight 0 are left out.
        penalties: (n,) to subtract from the total rewards, or None.
        objective: says which baseline and which scale.
        accelerator: the ranks.
    """
    rewards, weights = _rewards(groups, reward_weights)
    if penalties is not None:
        weights = torch.cat([weights, weights.new_tensor([-1.0])])
        rewards = torch.cat([rewards, penalties[:, None].to(rewards.dtype)], dim=1)
    sizes = torch.tensor([len(group.completions) for group in groups], dtype=torch.int64)
    rank, world = accelerator.process_index, accelerator.num_processes
    # Group g of rank r is g * world + r everywhere, so that no two groups share a number.
    ids = torch.arange(len(groups)).repeat_interleave(sizes) * world + rank
    all_rewards, all_ids = gather_object([rewards]), gather_object([ids])  # in rank order
    start = sum(len(part) for part in all_ids[:rank])
    advantages = _advantages(torch.cat(all_rewards), weights, torch.cat(all_ids), objective)
    return advantages, advantages.values[start : start + len(rewards)]


def has_spread(
    group: Group, reward_weights: Mapping[str, float], objective: ObjectiveSettings
) -> bool:
    """Whether the group's rewards give its completions advantages other than 0."""
    rewards, weights = _rewards([group], reward_weights)
    return not _advantages(rewards, weights, [0] * len(rewards), objective).zero_spread.any()


def _rewards(groups: Sequence[Group], reward_weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """The groups' weighted rewards, (n, k), NaN where there is none, and their weights, (k,)."""
    names = [name for name, weight in reward_weights.items() if weight]
    scores = [score for group in groups for score in group.scores]
    rewards = [[_number(score.rewards[name]) for name in names] for score in scores]
    weights = torch.tensor([reward_weights[name] for name in names])
    return torch.tensor(rewards).reshape(len(scores), len(names)), weights


def _advantages(
    rewards: Tensor, weights: Tensor, ids: Sequence[int] | Tensor, objective: ObjectiveSettings
) -> Advantages:
    estimator = objective.advantage_estimator
    if objective.normalize_each_reward:
        return per_reward_advantages(rewards, weights, ids, estimator=estimator)
    return group_advantages(
        rewards @ weights, ids, estimator=estimator, scale_rewards=objective.scale_rewards
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
