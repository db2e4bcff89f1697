"""Advantages of a step's completions, computed from the rewards of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.task import Task
from vlm_grpo.training.batch import Rollout, StepScores
from vlm_grpo.training.objective import (
    ADVANTAGE_ESTIMATORS,
    Advantages,
    StepEstimator,
    group_advantages,
    load_estimator,
    per_reward_advantages,
    step_advantages,
)
from vlm_grpo.types import Group


@dataclass(frozen=True)
class StepAdvantages:
    """The advantages of a step's completions.

    Attributes:
        own: (n,) advantages of this rank's completions, those of replayed groups last.
        step: advantages of all ranks' sampled completions, with the statistics of the groups.
        values: ``token_advantages``, if they differ within a completion: (T,) by completion of
            this rank.
    """

    own: Tensor
    step: Advantages
    values: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimator:
    """The estimator of a run's advantages.

    Attributes:
        objective: its settings.
        over_step: computes them from all groups of a step; None: each group's are its own.
    """

    objective: ObjectiveSettings
    over_step: StepEstimator | None = None

    @classmethod
    def load(cls, objective: ObjectiveSettings) -> Self:
        """Load the estimator that the settings name; raises UserError if it cannot be used."""
        name = objective.advantage_estimator
        return cls(objective, None if name in ADVANTAGE_ESTIMATORS else load_estimator(name))


def compute_advantages(
    rollout: Rollout,
    scores: StepScores,
    task: Task,
    estimator: Estimator,
    accelerator: Accelerator,
) -> StepAdvantages:
    """Compute the advantages of a step's completions.

    Args:
        rollout: this rank's groups, n completions in all with those of replayed groups, whose
            advantages are computed separately.
        scores: of other passes; KL penalties are subtracted from the total rewards.
        task: sets the reward weights; a reward of weight 0 is ignored.
        estimator: the run's estimator.
        accelerator: the ranks.
    """
    groups = rollout.groups
    if rollout.is_supervised:
        ones = torch.ones(sum(len(group.completions) for group in groups))
        return StepAdvantages(
            ones, Advantages(ones, torch.zeros(0), torch.zeros(0).bool(), ones > 0)
        )
    found = _gather_inputs(groups, task, scores.penalties)
    step, rows = _advantages(found, estimator), found.rows_of(accelerator.process_index)
    own, values = step.values[rows], {}
    if step.tokens is not None:
        values["token_advantages"] = dict(enumerate(step.tokens[rows]))
    if estimator.objective.replay is not None:
        found = _gather_inputs(rollout.replayed, task)
        again = _advantages(found, estimator).values[found.rows_of(accelerator.process_index)]
        own = torch.cat([own, again])
    return StepAdvantages(own, step, values)


@dataclass(frozen=True)
class _Inputs:
    """The rewards, (n, k), of n completions, and what else advantages depend on.

    Attributes:
        weights: (k,) weight of each reward.
        ids: number of each completion's group.
        lengths: (n,) number of tokens of each completion.
        penalties: (T,) KL penalties of each completion's tokens; None: there are none.
        sizes: number of completions of each rank.
    """

    rewards: Tensor
    weights: Tensor
    ids: Sequence[int]
    lengths: Tensor
    penalties: Sequence[Tensor] | None = None
    sizes: Sequence[int] = ()

    def rows_of(self, rank: int) -> slice:
        """Return the rows of a rank's completions."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


def _gather_inputs(
    groups: Sequence[Group], task: Task, penalties: Sequence[Tensor] | None = None
) -> _Inputs:
    """Gather the groups of all ranks, in rank order."""
    rewards, weights = _rewards(groups, task.reward_weights())
    lengths = [[len(c.token_ids) for c in group.completions] for group in groups]
    parts = gather_object([(rewards, lengths, penalties)])
    every = [sizes for _, lengths, _ in parts for sizes in lengths]
    return _Inputs(
        torch.cat([rewards for rewards, _, _ in parts]),
        weights,
        [number for number, sizes in enumerate(every) for _ in sizes],
        torch.tensor([length for sizes in every for length in sizes], dtype=torch.int64),
        None if penalties is None else [value for _, _, part in parts for value in part or ()],
        [len(rewards) for rewards, _, _ in parts],
    )


def has_spread(
    group: Group, reward_weights: Mapping[str, float], objective: ObjectiveSettings
) -> bool:
    """Return whether the group's rewards give its completions advantages of their own."""
    rewards, weights = _rewards([group], reward_weights)
    ids = [0] * len(rewards)
    if objective.normalize_each_reward:
        return not per_reward_advantages(rewards, weights, ids).zero_spread.any()
    return not group_advantages(rewards @ weights, ids).zero_spread.any()


def _rewards(groups: Sequence[Group], reward_weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return the groups' rewards, (n, k), NaN where undefined, and their weights, (k,)."""
    names = [name for name, weight in reward_weights.items() if weight]
    scores = [score for group in groups for score in group.scores]
    # A reward of another source of a mixture adds nothing.
    rewards = [[_number(score.rewards.get(name, 0.0)) for name in names] for score in scores]
    weights = torch.tensor([reward_weights[name] for name in names], dtype=torch.float32)
    return torch.tensor(rewards, dtype=torch.float32).reshape(len(scores), len(names)), weights


def _advantages(inputs: _Inputs, estimator: Estimator) -> Advantages:
    found, bound = _estimate(inputs, estimator), estimator.objective.advantage_clip
    if bound is None:
        return found
    tokens = found.tokens and tuple(part.clamp(-bound, bound) for part in found.tokens)
    return replace(found, values=found.values.clamp(-bound, bound), tokens=tokens)


def _estimate(inputs: _Inputs, estimator: Estimator) -> Advantages:
    rewards, weights, objective = inputs.rewards, inputs.weights, estimator.objective
    if estimator.over_step is not None:
        given = rewards @ weights, inputs.ids, inputs.lengths, estimator.over_step
        return step_advantages(*given, inputs.penalties)
    if inputs.penalties is not None:
        sums = [penalty.sum().to(rewards.dtype) for penalty in inputs.penalties]
        rewards = torch.cat([rewards, torch.stack(sums)[:, None]], dim=1)
        weights = torch.cat([weights, weights.new_tensor([-1.0])])
    name = objective.advantage_estimator
    if objective.normalize_each_reward:
        return per_reward_advantages(rewards, weights, inputs.ids, estimator=name)
    return group_advantages(
        rewards @ weights, inputs.ids, estimator=name, scale_rewards=objective.scale_rewards
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
