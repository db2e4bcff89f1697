"""Fully sharded data parallelism with PyTorch's FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.batch import MicroBatch
from vlm_grpo.model.families import find_part
from vlm_grpo.model.policy import Policy

_AUTOCAST = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
"""The precision of linear layers under autocast: bfloat16 weights cast from float32, gradients
summed in float32."""


def _is_norm(module: nn.Module) -> bool:
    """Whether the module is not a linear layer and directly holds parameters."""
    return not isinstance(module, nn.Linear) and any(True for _ in module.parameters(False))


class FSDP(Strategy):
    """FSDP2: every rank keeps 1/R of each weight, its gradient and its optimizer state.

    For rollouts, evaluations and reference passes the weights are gathered once, so that decoding
    a token needs no communication. In the update with ``stream``, each layer of the language model
    is gathered for each use and resharded afterwards, so all ranks make as many passes as the rank
    with the most micro-batches, and fill up with dummy passes. Without ``stream`` the layers stay
    gathered until the step's last pass. The embeddings, the head and a trained vision tower always
    stay gathered, and their gradients are reduced in one final dummy pass that all ranks make
    together, because not every rank has an image in every pass.

    Adapters and a frozen vision tower are small and are not sharded.

    With ``offload`` the shards, their gradients and the optimizer's state are in main memory, and
    the optimizer computes there. Gathering a weight copies this rank's shard to the device.

    With ``replicas`` > 1 (hybrid sharding), R is the number of ranks that share one replica:
    consecutive ranks, such as those of one machine. Gradients are all-reduced between replicas in
    every backward pass: if that were postponed to the end of the step, torch 2.15 would
    reduce-scatter again in every backward pass, including those that not all ranks make."""

    may_retry = False

    def __init__(
        self,
        policy: Policy,
        accelerator: Accelerator,
        stream: bool,
        replicas: int = 1,
        offload: bool = False,
    ) -> None:
        policy.engine.use_capture(None)  # the weights are gathered to other addresses for each step
        self.stream, self.replicas, self.offload = stream, replicas, offload
        super().__init__(policy, accelerator)

    def _place(self) -> None:
        policy, model = self.policy, self.policy.model
        why_not = policy.family.why_not_shared(model.config)
        if why_not is not None:
            raise UserError(
                f"FSDP needs to know the model's layers, and does not: {why_not}; launch with "
                "plain data parallelism"
            )
        vision = next(part for name, part in model.named_modules() if find_part(name) == "vision")
        ignored = set()
        if policy.adapters is not None:
            ignored = {weight for _, weight in policy.trainable_parameters()}
        if all(w in ignored or not w.requires_grad for w in vision.parameters()):
            ignored |= set(vision.parameters())
        device = self.accelerator.device
        is_pinned = device.type != "cpu"
        offload = CPUOffloadPolicy(pin_memory=is_pinned) if self.offload else OffloadPolicy()
        options: dict[str, Any] = {"mesh": self._mesh(), "ignored_params": ignored}
        options["offload_policy"] = offload
        layers = list(policy.family.language_model(model).layers)
        held: list[Any] = [policy.root]
        if not ignored.issuperset(vision.parameters()):
            held.append(vision)
        if policy.autocast:
            # A layer's linear weights are gathered in the precision that autocast computes in.
            # Autocast leaves norms, and everything outside the layers, in float32.
            norms = [module for layer in layers for module in layer.modules() if _is_norm(module)]
            fully_shard(norms, reshard_after_forward=False, **options)
            held.append(norms[0])
        for layer in layers:
            fully_shard(
                layer,
                reshard_after_forward=self.stream,
                mp_policy=_AUTOCAST if policy.autocast else MixedPrecisionPolicy(),
                **options,
            )
        for module in reversed(held):  # the root last
            if not isinstance(module, FSDPModule):
                fully_shard(module, reshard_after_forward=False, **options)
        # Shards are where they belong. Buffers tell the policy on which device to compute.
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
        self.streamed = layers if self.stream else []
        self.held = held if self.stream else [*held, *layers]
        for module in self._modules:
            # Losses are divided by the totals of all ranks: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _mesh(self) -> DeviceMesh:
        kind, world_size = self.accelerator.device.type, self.accelerator.num_processes
        if self.replicas == 1:
            return init_device_mesh(kind, (world_size,))
        shape = (self.replicas, world_size // self.replicas)
        return init_device_mesh(kind, shape, mesh_dim_names=("dp_replicate", "dp_shard"))

    @property
    def _modules(self) -> list[FSDPModule]:
        return [*self.held, *self.streamed]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        for module in self._modules:
            module.unshard()
        for layer in self.streamed:
            layer.set_reshard_after_forward(False)
        try:
            yield
        finally:
            for layer in self.streamed:
                layer.set_reshard_after_forward(True)
            if self.stream:
                self.release()

    def release(self) -> None:
        for module in self._modules:
            module.reshard()

    def weights(self) -> dict[str, Tensor]:
        if self.policy.adapters is not None:  # adapters are not sharded
            return self.policy.weights()
        self.release()
        # A tied weight has several names and one tensor, which is written once.
        tied = dict(self.policy.model.named_parameters(remove_duplicate=False))
        return {name: tied.get(name, value) for name, value in self.policy.weights().items()}

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        for module in self.held:
            module.unshard()
            self._set_reduction(module, False)
        count = max(gather_object([len(batches)])) if self.stream else len(batches)
        yield from batches
        yield from [None] * (count - len(batches))
        if any(isinstance(weight, DTensor) for _, weight in self.trainable):
            for module in self.held:
                self._set_reduction(module, True)
            yield None

    @staticmethod
    def _set_reduction(module: FSDPModule, enabled: bool) -> None:
        module.set_requires_gradient_sync(enabled, recurse=False)
        module.set_reshard_after_backward(enabled, recurse=False)

    def dummy_loss(self) -> Tensor:
        loss = self.policy.score(self.policy.dummy_batch()).logprobs.sum()
        for weight in self.policy.root.parameters():
            if weight.requires_grad and not isinstance(weight, DTensor):
                loss = loss + weight.sum()
        return 0 * loss
