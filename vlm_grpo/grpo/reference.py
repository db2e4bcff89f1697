"""The reference policy: a snapshot of what is trained, refreshed every k steps.

What is not trained is the same in policy and reference, so the snapshot holds the trainable
weights alone: a few megabytes for an adapter, one copy of the model for full weights. While the
reference is asked for log-probabilities, the snapshot takes the weights' place. It may be kept on
the host, so that the accelerator holds it only during that pass, when there are no gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import nn

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.distributed.sharding import (
    full_shape,
    is_sharded,
    local_shard,
    shard_like,
    unshard_like,
)
from vlm_grpo.errors import UserError


class Reference:
    """The reference policy of a run.

    With ``beta = 0``, or refreshed at every step, there is no snapshot: the reference is not
    needed, or is the policy at the start of the step, whose log-probabilities the update has.

    Args:
        trainable: names and weights that training changes, as they are at the start.
        objective: says whether a reference is needed, how often it is refreshed and where it is
            kept.
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
            policy = ((name, local_shard(weight).detach()) for name, weight in trainable)
            self.snapshot = {name: self._keep(weight) for name, weight in policy}

    def refresh(self, step: int) -> bool:
        """Make the policy the reference if ``step`` (from 0) is one of every k; say whether."""
        if self.snapshot is None or self.every == "never":
            return False
        due = step % self.every == 0
        if due:
            for name, weight in self.trainable.items():
                self.snapshot[name].copy_(local_shard(weight).detach())
        return due

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy's weights are the reference's inside."""
        if self.snapshot is None:
            raise RuntimeError("these settings keep no reference policy")
        policy = {name: _taken(weight) for name, weight in self.trainable.items()}
        try:
            for name, weight in self.trainable.items():
                _put(weight, self.snapshot[name].to(weight.device))
            yield
        finally:
            for name, weight in self.trainable.items():
                _put(weight, policy[name])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The snapshot, empty where there is none."""
        snapshot = self.snapshot or {}
        return {name: unshard_like(part, self.trainable[name]) for name, part in snapshot.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take a saved snapshot.

        Raises:
            UserError: it does not hold the weights that these settings train.
        """
        wrong = UserError(
            "the checkpoint's reference policy does not fit: it holds other weights than these "
            "settings train"
        )
        snapshot = self.snapshot or {}
        if state.keys() != snapshot.keys():
            raise wrong
        for name, held in snapshot.items():
            weight = state[name]  # read from the disk here, and once
            if weight.shape != full_shape(self.trainable[name]):
                raise wrong
            held.copy_(local_shard(shard_like(weight, self.trainable[name])))

    def _keep(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of the weight where snapshots are kept."""
        return weight.to("cpu", copy=True) if self.on_host else weight.clone()


def _taken(weight: nn.Parameter) -> torch.Tensor:
    """This rank's values of the weight, which ``_put`` leaves as they are."""
    return local_shard(weight).detach().clone() if is_sharded(weight) else weight.data


@torch.no_grad()
def _put(weight: nn.Parameter, part: torch.Tensor) -> None:
    """Give the weight other values: by reference where it is whole; a shard stays in its place."""
    if is_sharded(weight):
        local_shard(weight).copy_(part)
    else:
        weight.data = part
