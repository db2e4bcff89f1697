"""Advantages, KL and losses as pure functions of tensors.

``advantages`` computes advantages from rewards, ``kl`` holds the KL estimators, ``losses`` computes
the loss from log-probabilities and advantages, ``diagnostics`` its metrics. docs/objective.md has
the derivations.
"""

from vlm_grpo.training.objective.advantages import (
    ADVANTAGE_ESTIMATORS,
    STEP_ESTIMATORS,
    AdvantageInputs,
    Advantages,
    StepEstimator,
    group_advantages,
    per_reward_advantages,
    step_advantages,
)
from vlm_grpo.training.objective.batch import StepTotals, TokenBatch
from vlm_grpo.training.objective.custom import load_estimator, load_surrogate
from vlm_grpo.training.objective.diagnostics import MetricAccumulator
from vlm_grpo.training.objective.kl import KL_ESTIMATORS, image_dependency
from vlm_grpo.training.objective.losses import (
    LossOutput,
    Surrogate,
    completion_weights,
    compute_loss,
    needs_update,
    policy_loss,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "STEP_ESTIMATORS",
    "AdvantageInputs",
    "Advantages",
    "LossOutput",
    "MetricAccumulator",
    "StepEstimator",
    "StepTotals",
    "Surrogate",
    "TokenBatch",
    "completion_weights",
    "compute_loss",
    "group_advantages",
    "image_dependency",
    "load_estimator",
    "load_surrogate",
    "needs_update",
    "per_reward_advantages",
    "policy_loss",
    "step_advantages",
]
