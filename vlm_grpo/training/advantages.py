"""Advantages of a step's completions, computed from the rewards of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.training.batch import Rollout, Values
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
    """The advantages of a step's completions."""

    own: Tensor  # (n,) advantages of this rank's completions, those of recalled groups last
    # advantages of all ranks' sampled completions, with the statistics of the groups
    step: Advantages
    # (T,) advantages of the tokens of this rank's completions, if they differ within a completion
    tokens: Tensor | None = None


@dataclass(frozen=True)
class Estimator:
    """The estimator of a run's advantages."""

    objective: ObjectiveSettings
    # computes them from all groups of a step; None: each group's are its own
    over_step: StepEstimator | None = None

    @classmethod
    def load(cls, objective: ObjectiveSettings) -> Self:
        name = objective.advantage_estimator
        return cls(objective, None if name in ADVANTAGE_ESTIMATORS else load_estimator(name))


def compute_advantages(
    rollout: Rollout, scores: Values, estimator: Estimator, accelerator: Accelerator
) -> StepAdvantages:
    """Compute the advantages of a step's completions.

    Those of recalled groups are computed separately. ``penalties`` among the scores are subtracted
    from the total rewards.
    """
    if rollout.author is not None:
        ones = torch.ones(rollout.num_sampled)
        none = torch.zeros(0)
        return StepAdvantages(ones, Advantages(ones, none, none.bool(), ones > 0))
    weights, rank = rollout.reward_weights, accelerator.process_index
    sampled = _Part.of(rollout.groups, weights, scores.get("penalties"))
    parts = gather_object([(sampled, _Part.of(rollout.recalled, weights))])
    found, again = (_Inputs.join(list(each), weights) for each in zip(*parts, strict=True))
    step = _advantages(found, estimator)
    pairs = [(step, found.rows_of(rank))]
    if len(again.rewards):
        pairs.append((_advantages(again, estimator), again.rows_of(rank)))
    own = torch.cat([each.values[rows] for each, rows in pairs])
    if step.tokens is None:
        return StepAdvantages(own, step)
    tokens = [part for each, rows in pairs for part in (each.tokens or ())[rows]]
    return StepAdvantages(own, step, torch.cat([*tokens, torch.zeros(0)]))


class _Part(NamedTuple):
    """What advantages of one rank's completions depend on."""

    rewards: Tensor  # (n, k) rewards
    lengths: list[list[int]]  # number of tokens of each completion, by group
    penalties: Tensor | None  # KL penalties of all their tokens; None: there are none

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        reward_weights: Mapping[str, float],
        penalties: Tensor | None = None,
    ) -> Self:
        lengths = [[len(c.token_ids) for c in group.completions] for group in groups]
        return cls(_rewards(groups, reward_weights)[0], lengths, penalties)


@dataclass(frozen=True)
class _Inputs:
    """The rewards, (n, k), of n completions of all ranks, and what else advantages depend on."""

    rewards: Tensor
    weights: Tensor  # (k,) weight of each reward
    ids: Sequence[int]  # number of each completion's group
    lengths: Tensor  # (n,) number of tokens of each completion
    # (T,) KL penalties of each completion's tokens; None: there are none
    penalties: Sequence[Tensor] | None
    sizes: Sequence[int]

    @classmethod
    def join(cls, parts: Sequence[_Part], reward_weights: Mapping[str, float]) -> Self:
        every = [sizes for part in parts for sizes in part.lengths]
        lengths = [length for sizes in every for length in sizes]
        known = [part.penalties for part in parts if part.penalties is not None]
        return cls(
            torch.cat([part.rewards for part in parts]),
            _rewards((), reward_weights)[1],
            [number for number, sizes in enumerate(every) for _ in sizes],
            torch.tensor(lengths, dtype=torch.int64),
            torch.cat(known).split(lengths) if known else None,
            [len(part.rewards) for part in parts],
        )

    def rows_of(self, rank: int) -> slice:
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


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
