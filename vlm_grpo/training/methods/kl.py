"""The KL to a reference policy: a snapshot of the trainable weights, refreshed every k steps.

Frozen weights are shared by policy and reference, so the snapshot holds the trainable weights
only: a few megabytes for an adapter, one copy of the model for full weights. The snapshot is
swapped in for the reference pass. It may be kept in host memory; it is then on the accelerator only
during that pass, when there are no gradients.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.requirements import get
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import full_shape, is_sharded, local_shard, shard_like, unshard_like
from vlm_grpo.errors import UserError
from vlm_grpo.model.transfer import snapshot_on_host
from vlm_grpo.training.batch import Rollout, Values
from vlm_grpo.training.methods import Method, Passes, Run
from vlm_grpo.training.objective import KL_ESTIMATORS


class ReferenceKL(Method):
    """The KL of the policy to a reference policy that is kept beside it.

    It is not used if the reference is refreshed in every step, because its log-probs are then those
    that the update starts from. ``vlm_grpo.training.objective.losses`` has the term.
    """

    name, phase, state_name = "kl", "reference", "reference"
    own: ObjectiveSettings
    trainable: dict[str, nn.Parameter]
    snapshot: dict[str, Tensor]  # the reference's trainable weights, or this rank's shards of them

    @classmethod
    def find(cls, settings: Settings | Mapping[str, Any]) -> ObjectiveSettings | None:
        objective = get(settings, "objective")
        return objective if objective is not None and objective.needs_reference else None

    def start(self, run: Run) -> None:
        super().start(run)
        self.trainable = dict(run.strategy.trainable)
        weights = [local_shard(weight).detach() for weight in self.trainable.values()]
        on_host = self.own.reference_device == "cpu"
        copies = snapshot_on_host(weights) if on_host else [w.clone() for w in weights]
        self.snapshot = dict(zip(self.trainable, copies, strict=True))

    def begin(self, rollout: Rollout, scheduler: Any) -> None:
        """Refresh the reference if it is due, and before the first rollout."""
        every, done = self.own.reference_refresh_every, rollout.step
        done -= self.run.settings.supervised_steps
        if done == 0 < rollout.step or (every != "never" and done % every == 0):
            self.copy_policy()

    def copy_policy(self) -> None:
        for name, part in self.snapshot.items():
            part.copy_(local_shard(self.trainable[name]).detach())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the reference's weights into the model inside."""
        policy = {name: _values(weight) for name, weight in self.trainable.items()}
        try:
            for name, weight in self.trainable.items():
                _set(weight, self.snapshot[name].to(weight.device, non_blocking=True))
            yield
        finally:
            for name, weight in self.trainable.items():
                _set(weight, policy[name])

    def score(self, passes: Passes) -> Values:
        reference = passes.logprobs(weights=self.in_place())
        if self.own.kl_in == "loss":
            return {"reference_logprobs": reference}
        estimate, policy = KL_ESTIMATORS[self.own.kl_estimator], passes.logprobs()
        penalties = self.own.beta * estimate(policy.cpu(), reference.cpu())
        return {
            "reference_logprobs": reference,
            "penalties": penalties,
            "old_logprobs": policy,
        }

    def state_dict(self) -> tuple[None, dict[str, Any]]:
        pairs = self.snapshot.items()
        return None, {name: unshard_like(part, self.trainable[name]) for name, part in pairs}

    def load_state_dict(self, values: Any, tensors: Mapping[str, Tensor]) -> None:
        mismatch = UserError(
            "the checkpoint's reference policy holds other weights than these settings train: "
            "resume with the settings that wrote it"
        )
        if tensors.keys() != self.snapshot.keys():
            raise mismatch
        for name, held in self.snapshot.items():
            weight = tensors[name]  # read from disk here, once
            if weight.shape != full_shape(self.trainable[name]):
                raise mismatch
            held.copy_(local_shard(shard_like(weight, self.trainable[name])))


def _values(weight: nn.Parameter) -> Tensor:
    """Return this rank's values of the weight, which ``_set`` does not overwrite."""
    return local_shard(weight).detach().clone() if is_sharded(weight) else weight.data


@torch.no_grad()
def _set(weight: nn.Parameter, part: Tensor) -> None:
    """Set the values of the weight: in place for a shard, by reference otherwise."""
    if is_sharded(weight):
        local_shard(weight).copy_(part)
    else:
        weight.data = part
