"""Advantages of a step's completions, computed from the rewards of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.distributed.collectives import gather_object
from vlm_grpo.grpo.batch import Rollout
from vlm_grpo.grpo.reference import ReferenceScores
from vlm_grpo.objective import Advantages, group_advantages, per_reward_advantages
from vlm_grpo.task import Task
from vlm_grpo.types import Group


@dataclass(frozen=True)
class StepAdvantages:
    """The advantages of a step's completions.

    Attributes:
        own: (n,) advantages of this rank's completions, those of replayed groups last.
        step: advantages of all ranks' sampled completions, with the statistics of the groups.
    """

    own: Tensor
    step: Advantages


def compute_advantages(
    rollout: Rollout,
    reference: ReferenceScores,
    task: Task,
    settings: Settings,
    accelerator: Accelerator,
) -> StepAdvantages:
    """Compute the advantages of a step's completions.

    Args:
        rollout: this rank's groups, n completions in all with those of replayed groups, whose
            advantages are computed separately.
        reference: scores of the reference; KL penalties are subtracted from the total rewards.
        task: sets the reward weights; a reward of weight 0 is ignored.
        settings: the run's settings.
        accelerator: the ranks.
    """
    groups = rollout.groups
    if rollout.is_supervised:
        ones = torch.ones(sum(len(group.completions) for group in groups))
        return StepAdvantages(
            ones, Advantages(ones, torch.zeros(0), torch.zeros(0).bool(), ones > 0)
        )
    rewards, weights = _rewards(groups, task.reward_weights())
    if reference.penalties is not None:
        weights = torch.cat([weights, weights.new_tensor([-1.0])])
        rewards = torch.cat([rewards, reference.penalties[:, None].to(rewards.dtype)], dim=1)
    own, step = _gather_advantages(groups, rewards, weights, settings, accelerator)
    if settings.objective.replay is not None:
        rewards, weights = _rewards(rollout.replayed, task.reward_weights())
        again, _ = _gather_advantages(rollout.replayed, rewards, weights, settings, accelerator)
        own = torch.cat([own, again])
    return StepAdvantages(own, step)


def _gather_advantages(
    groups: Sequence[Group],
    rewards: Tensor,
    weights: Tensor,
    settings: Settings,
    accelerator: Accelerator,
) -> tuple[Tensor, Advantages]:
    """Return the advantages of this rank's completions, and those of all ranks."""
    rank = accelerator.process_index
    all_rewards = gather_object([rewards])  # in rank order
    sizes = gather_object([len(group.completions) for group in groups])
    ids = [number for number, size in enumerate(sizes) for _ in range(size)]
    start = sum(len(part) for part in all_rewards[:rank])
    step = _advantages(torch.cat(all_rewards), weights, ids, settings.objective)
    return step.values[start : start + len(rewards)], step


def has_spread(
    group: Group, reward_weights: Mapping[str, float], objective: ObjectiveSettings
) -> bool:
    """Return whether the group's rewards give its completions non-zero advantages."""
    rewards, weights = _rewards([group], reward_weights)
    return not _advantages(rewards, weights, [0] * len(rewards), objective).zero_spread.any()


def _rewards(groups: Sequence[Group], reward_weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return the groups' rewards, (n, k), NaN where undefined, and their weights, (k,)."""
    names = [name for name, weight in reward_weights.items() if weight]
    scores = [score for group in groups for score in group.scores]
    # A reward of another source of a mixture adds nothing.
    rewards = [[_number(score.rewards.get(name, 0.0)) for name in names] for score in scores]
    weights = torch.tensor([reward_weights[name] for name in names], dtype=torch.float32)
    return torch.tensor(rewards, dtype=torch.float32).reshape(len(scores), len(names)), weights


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
