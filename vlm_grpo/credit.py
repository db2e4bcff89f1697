"""From a step's scored groups to the advantages of its completions, on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from vlm_grpo.objective import Advantages, group_advantages, per_reward_advantages
from vlm_grpo.objective_settings import ObjectiveSettings
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
    names = [name for name, weight in reward_weights.items() if weight]
    weights = [reward_weights[name] for name in names]
    scores = [score for group in groups for score in group.scores]
    rewards = torch.tensor([[_number(score.rewards[name]) for name in names] for score in scores])
    if penalties is not None:
        weights.append(-1.0)
        rewards = torch.cat([rewards, penalties[:, None].to(rewards.dtype)], dim=1)
    sizes = torch.tensor([len(group.completions) for group in groups])
    rank, world = accelerator.process_index, accelerator.num_processes
    # Group g of rank r is g * world + r everywhere, so that no two groups share a number.
    ids = torch.arange(len(groups)).repeat_interleave(sizes) * world + rank
    all_rewards, all_ids = gather_object([rewards]), gather_object([ids])  # in rank order
    start = sum(len(part) for part in all_ids[:rank])
    rewards, ids = torch.cat(all_rewards), torch.cat(all_ids)
    estimator, coefficients = objective.advantage_estimator, torch.tensor(weights)
    if objective.normalize_each_reward:
        advantages = per_reward_advantages(rewards, coefficients, ids, estimator=estimator)
    else:
        advantages = group_advantages(
            rewards @ coefficients,
            ids,
            estimator=estimator,
            scale_rewards=objective.scale_rewards,
        )
    return advantages, advantages.values[start : start + len(scores)]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
