"""A copy of the trainable weights, which scores in the place of the policy's.

Frozen weights are shared with the policy, so a copy holds the trainable ones only: a few megabytes
for an adapter, one copy of the model for full weights. It is swapped in for a pass. It may be kept
in host memory; it is then on the accelerator only during that pass, when there are no gradients.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.dist.weights import local_shard, shard_like, unshard_like
from vlm_grpo.errors import UserError
from vlm_grpo.model.transfer import snapshot_on_host


class Snapshot:
    """A copy of the trainable weights, or of this rank's shards of them."""

    def __init__(self, strategy: Strategy, on_host: bool = False) -> None:
        self.trainable = dict(strategy.trainable)
        weights = [local_shard(weight).detach() for weight in self.trainable.values()]
        copies = snapshot_on_host(weights) if on_host else [w.clone() for w in weights]
        self.held: dict[str, Tensor] = dict(zip(self.trainable, copies, strict=True))

    @torch.no_grad()
    def move(self, share: float = 1.0) -> None:
        """Move the copy by a share of its difference from the policy; 1: to the policy."""
        for name, held in self.held.items():
            policy = local_shard(self.trainable[name])
            if share == 1:
                held.copy_(policy)
            else:
                held.lerp_(policy.to(held.device), share)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the copy into the model inside."""
        policy = {name: _values(weight) for name, weight in self.trainable.items()}
        try:
            for name, weight in self.trainable.items():
                _set(weight, self.held[name].to(weight.device, non_blocking=True))
            yield
        finally:
            for name, weight in self.trainable.items():
                _set(weight, policy[name])

    def state_dict(self) -> dict[str, Any]:
        return {n: unshard_like(part, self.trainable[n]) for n, part in self.held.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        mismatch = UserError(
            "the checkpoint's reference policy or teacher holds other weights than these settings "
            "train: resume with the settings that wrote it"
        )
        if tensors.keys() != self.held.keys():
            raise mismatch
        for name, held in self.held.items():
            weight = tensors[name]  # read from disk here, once
            if weight.shape != self.trainable[name].shape:
                raise mismatch
            held.copy_(local_shard(shard_like(weight, self.trainable[name])))


def _values(weight: nn.Parameter) -> Tensor:
    """Return this rank's values of the weight, which ``_set`` does not overwrite."""
    return local_shard(weight).detach().clone() if isinstance(weight, DTensor) else weight.data


@torch.no_grad()
def _set(weight: nn.Parameter, part: Tensor) -> None:
    """Set the values of the weight: in place for a shard, by reference otherwise."""
    if isinstance(weight, DTensor):
        local_shard(weight).copy_(part)
    else:
        weight.data = part
