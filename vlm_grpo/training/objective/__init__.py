"""Advantages, KL and losses as pure functions of tensors.

``advantages`` computes advantages from rewards, ``losses`` the loss from log-probabilities and
advantages, with the KL estimators and the metrics. docs/objective.md has the derivations.
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
from vlm_grpo.training.objective.batch import MetricAccumulator, StepTotals, TokenBatch
from vlm_grpo.training.objective.custom import load_estimator, load_surrogate
from vlm_grpo.training.objective.losses import (
    KL_ESTIMATORS,
    LossInputs,
    LossOutput,
    Shares,
    Surrogate,
    completion_weights,
    compute_loss,
    image_dependency,
    k3,
    policy_loss,
)
