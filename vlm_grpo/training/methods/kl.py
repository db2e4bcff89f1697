"""The pass of the KL to the reference policy, whose penalties may be subtracted from rewards."""

from __future__ import annotations

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.batch import copy_to_host
from vlm_grpo.training.methods import Method, ScoredStep, Scores
from vlm_grpo.training.objective.kl import KL_ESTIMATORS


class ReferenceKL(Method):
    """The KL of the policy to the reference policy; ``training/reference.py`` keeps the latter."""

    name, phase = "kl", "reference"

    @classmethod
    def is_used(cls, objective: ObjectiveSettings) -> bool:
        return objective.needs_reference

    def score(self, step: ScoredStep) -> Scores:
        objective, reference = self.settings.objective, step.scorer.reference_logprobs(step.slices)
        if objective.kl_in == "reward":
            ours, theirs = copy_to_host(step.old_logprobs), copy_to_host(reference)
            estimate = KL_ESTIMATORS[objective.kl_estimator]
            step.penalties = [
                objective.beta * estimate(ours[row], theirs[row]) for row in range(len(ours))
            ]
        return {"reference_logprobs": reference}
