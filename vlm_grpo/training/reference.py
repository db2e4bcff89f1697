"""The reference policy: a snapshot of the trainable weights, refreshed every k steps.

Frozen weights are shared by policy and reference, so the snapshot holds the trainable weights
only: a few megabytes for an adapter, one copy of the model for full weights. The snapshot is
swapped in for the reference pass. It may be kept in host memory; it is then on the accelerator only
during that pass, when there are no gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.dist.sharding import full_shape, is_sharded, local_shard, shard_like, unshard_like
from vlm_grpo.errors import UserError
from vlm_grpo.model.transfer import snapshot_on_host


class Reference:
    """The reference policy of a run.

    There is no snapshot if ``beta`` is 0, because no reference is needed, or if it is refreshed in
    every step, because its log-probs are then those that the update starts from.

    Args:
        trainable: names and values of the trained weights at the start of the run.
        objective: settings of the objective.
    """

    def __init__(
        self,
        trainable: list[tuple[str, nn.Parameter]],
        objective: ObjectiveSettings,
    ) -> None:
        self.trainable = dict(trainable)
        self.every: int | Literal["never"] = objective.reference_refresh_every
        self.on_host = objective.reference_device == "cpu"
        self.snapshot: dict[str, torch.Tensor] | None = None
        if objective.needs_reference:
            weights = [local_shard(weight).detach() for _, weight in trainable]
            copies = snapshot_on_host(weights) if self.on_host else [w.clone() for w in weights]
            self.snapshot = dict(zip(self.trainable, copies, strict=True))

    def refresh(self, step: int) -> None:
        """Copy the policy to the reference if ``step``, since the first rollout, is due."""
        if self.every == "never" or step % self.every:
            return
        self.copy_policy()

    def copy_policy(self) -> None:
        """Copy the policy to the reference, if there is a snapshot."""
        for name, part in (self.snapshot or {}).items():
            part.copy_(local_shard(self.trainable[name]).detach())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the reference's weights into the model inside the context."""
        if self.snapshot is None:
            raise RuntimeError("these settings keep no reference policy")
        policy = {name: _values(weight) for name, weight in self.trainable.items()}
        try:
            for name, weight in self.trainable.items():
                _set(weight, self.snapshot[name].to(weight.device, non_blocking=True))
            yield
        finally:
            for name, weight in self.trainable.items():
                _set(weight, policy[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshot's tensors, sharded like the weights; empty if there is none."""
        snapshot = self.snapshot or {}
        return {name: unshard_like(part, self.trainable[name]) for name, part in snapshot.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a saved snapshot.

        Raises:
            UserError: it does not hold the weights that these settings train.
        """
        mismatch = UserError(
            "the checkpoint's reference policy holds other weights than these settings train: "
            "resume with the settings that wrote it"
        )
        snapshot = self.snapshot or {}
        if state.keys() != snapshot.keys():
            raise mismatch
        for name, held in snapshot.items():
            weight = state[name]  # read from disk here, once
            if weight.shape != full_shape(self.trainable[name]):
                raise mismatch
            held.copy_(local_shard(shard_like(weight, self.trainable[name])))


def _values(weight: nn.Parameter) -> torch.Tensor:
    """Return this rank's values of the weight, which ``_set`` does not overwrite."""
    return local_shard(weight).detach().clone() if is_sharded(weight) else weight.data


@torch.no_grad()
def _set(weight: nn.Parameter, part: torch.Tensor) -> None:
    """Set the values of the weight: in place for a shard, by reference otherwise."""
    if is_sharded(weight):
        local_shard(weight).copy_(part)
    else:
        weight.data = part
