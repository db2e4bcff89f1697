"""Advantages, KL and losses as pure functions of tensors.

``advantages`` computes advantages from rewards, ``kl`` holds the KL estimators, ``losses`` computes
the loss from log-probabilities and advantages, ``diagnostics`` its metrics. docs/objective.md has
the derivations.
"""

from vlm_grpo.objective.advantages import (
    ADVANTAGE_ESTIMATORS,
    Advantages,
    group_advantages,
    per_reward_advantages,
)
from vlm_grpo.objective.batch import StepTotals, TokenBatch
from vlm_grpo.objective.custom import load_surrogate
from vlm_grpo.objective.diagnostics import MetricAccumulator
from vlm_grpo.objective.kl import KL_ESTIMATORS, kl_penalties
from vlm_grpo.objective.losses import (
    LossOutput,
    Surrogate,
    cross_entropy,
    needs_update,
    policy_loss,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "Advantages",
    "LossOutput",
    "MetricAccumulator",
    "StepTotals",
    "Surrogate",
    "TokenBatch",
    "cross_entropy",
    "group_advantages",
    "kl_penalties",
    "load_surrogate",
    "needs_update",
    "per_reward_advantages",
    "policy_loss",
]
