"""The parts of a GRPO step: rollout, advantages, reference and update."""

from vlm_grpo.grpo.advantages import Estimator, StepAdvantages, compute_advantages
from vlm_grpo.grpo.batch import Rollout, StepBatch, pack_step, score_groups
from vlm_grpo.grpo.memory import memory_metrics
from vlm_grpo.grpo.nonfinite import NonfiniteGuard
from vlm_grpo.grpo.rollout import RolloutSampler, build_rollout_sampler
from vlm_grpo.grpo.targets import select_usable
from vlm_grpo.grpo.update import Updater, Updates, build_updater

__all__ = [
    "Estimator",
    "NonfiniteGuard",
    "Rollout",
    "RolloutSampler",
    "StepAdvantages",
    "StepBatch",
    "Updater",
    "Updates",
    "build_rollout_sampler",
    "build_updater",
    "compute_advantages",
    "memory_metrics",
    "pack_step",
    "score_groups",
    "select_usable",
]
