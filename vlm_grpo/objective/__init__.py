"""Advantages, KL and losses as pure functions of tensors.

``advantages`` turns rewards into advantages, ``kl`` holds the KL estimators, ``losses`` turns
log-probabilities and advantages into the loss, ``diagnostics`` measures it. The derivations are
in docs/objective.md.
"""

from vlm_grpo.objective.advantages import (
    ADVANTAGE_ESTIMATORS,
    Advantages,
    group_advantages,
    per_reward_advantages,
)
from vlm_grpo.objective.batch import StepTotals, TokenBatch
from vlm_grpo.objective.diagnostics import MetricAccumulator
from vlm_grpo.objective.kl import KL_ESTIMATORS, kl_penalties
from vlm_grpo.objective.losses import LossOutput, needs_update, policy_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "Advantages",
    "LossOutput",
    "MetricAccumulator",
    "StepTotals",
    "TokenBatch",
    "group_advantages",
    "kl_penalties",
    "needs_update",
    "per_reward_advantages",
    "policy_loss",
]
