"""The KL to a reference policy: a copy of the trainable weights, refreshed every k steps."""

from collections.abc import Mapping
from typing import Any

from vlm_grpo.config.combinations import get
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.training.methods import Method, Passes, Run
from vlm_grpo.training.objective.kl import KL_ESTIMATORS
from vlm_grpo.training.snapshot import Snapshot
from vlm_grpo.training.step_batch import Rollout, Values


class ReferenceKL(Method):
    """The KL of the policy to a reference policy that is kept beside it.

    It is not used if the reference is refreshed in every step, because its log-probs are then those
    that the update starts from. ``vlm_grpo.training.objective.losses`` has the term.
    """

    name, phase, state_name = "kl", "reference", "reference"
    own: ObjectiveSettings

    @classmethod
    def find(cls, settings: Settings | Mapping[str, Any]) -> ObjectiveSettings | None:
        objective = get(settings, "objective")
        return objective if objective is not None and objective.needs_reference else None

    def start(self, run: Run) -> None:
        super().start(run)
        self.snapshot = Snapshot(run.strategy, self.own.reference_device == "cpu")

    def begin(self, rollout: Rollout, scheduler: Any) -> None:
        """Refresh the reference if it is due, and before the first rollout."""
        every, done = self.own.reference_refresh_every, rollout.step
        done -= self.run.settings.supervised_steps
        if done == 0 < rollout.step or (every != "never" and done % every == 0):
            self.snapshot.move()

    def score(self, passes: Passes) -> Values:
        reference = passes.score(weights=self.snapshot.in_place()).logprobs
        if self.own.kl_in == "loss":
            return {"reference_logprobs": reference}
        estimate, policy = KL_ESTIMATORS[self.own.kl_estimator], passes.score().logprobs
        penalties = self.own.beta * estimate(policy.cpu(), reference.cpu())
        return {"reference_logprobs": reference, "penalties": penalties, "old_logprobs": policy}
