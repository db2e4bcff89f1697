"""The ways to distribute a step's weights over ranks, with one interface.

Every strategy computes the same step. Each rank takes complete groups and runs as many
micro-batches as they fill. Gradients are reduced once per step, after the last micro-batch (with
FSDP's ``stream``, in every pass). A rollout, an evaluation or a reference pass needs no
communication once the weights are gathered, so ranks with more, fewer or no groups, or without an
image, never wait for each other in the middle of a pass.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from vlm_grpo.dist.collectives import gather_object, sum_over_ranks
from vlm_grpo.dist.launch import get_dp_replicate_size, get_fsdp_plugin
from vlm_grpo.dist.weights import broadcast_weights, get_tensors
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.packing import MicroBatch
from vlm_grpo.model.families.family import find_part
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.sharing_check import why_not_shared

_AUTOCAST = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
"""Linear layers under autocast: bfloat16 weights cast from float32, gradients summed in float32."""


class Strategy:
    """A way to distribute a policy's weights over ranks, and to reduce and apply its gradients.

    This one is data parallelism: every rank has all weights. Others override what they shard.
    """

    may_retry = True  # whether a rank that runs out of memory may repeat its micro-batches alone

    def __init__(self, policy: Policy, accelerator: Accelerator) -> None:
        self.policy, self.accelerator = policy, accelerator
        whole = get_tensors(policy.model) if policy.one_reader else {}
        self._place()
        if policy.one_reader:
            broadcast_weights(policy.model, whole, accelerator)
        del whole
        self.trainable = policy.trainable_parameters()
        self.optimizer: torch.optim.Optimizer  # after ``attach_optimizer``
        self.max_norm = math.inf  # of the gradient over all weights; infinity disables clipping

    def _place(self) -> None:
        """Move the model to the device; a strategy that shards it does so here."""
        self.policy.model.to(self.accelerator.device)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Set the optimizer of ``trainable``, before its first step, and the maximum norm."""
        self.optimizer, self.max_norm = optimizer, max_norm

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weights inside, where passes without gradient then need no communication.

        All ranks enter and leave together.
        """
        yield

    def release(self) -> None:
        """Drop gathered copies of the weights, because these have changed or will change."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the tensors of ``Policy.weights``, sharded where the strategy shards them."""
        return self.policy.weights()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of a step inside; reduce them over all ranks at the end."""
        yield
        # AdamW moves the weights whose gradient is zero, but not those without one, and skipping
        # groups must not change the result.
        for _, weight in self.trainable:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        grads = [weight.grad for _, weight in self.trainable]
        sum_over_ranks(self.accelerator, [g for g in grads if not isinstance(g, DTensor)])  # type: ignore[misc]

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        """Yield the micro-batches to run forward and backward, and None for a dummy pass, which
        this rank makes because the communication of other ranks needs it.
        """
        yield from batches

    def dummy_loss(self) -> Tensor:
        """Return the loss of a dummy pass: 0, with a zero gradient for every weight."""
        raise RuntimeError("this strategy makes no dummy passes")

    def step(self) -> float:
        """Clip the reduced gradients, make one optimizer step, drop the gradients, and return their
        norm before clipping. If it is not finite, no weight has changed."""
        norm = nn.utils.clip_grad_norm_([weight for _, weight in self.trainable], self.max_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        for _, weight in self.trainable:
            weight.grad = None


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
        self, policy: Policy, accelerator: Accelerator, stream: bool, replicas: int, offload: bool
    ) -> None:
        policy.engine.use_capture(None)  # the weights are gathered to other addresses for each step
        self.stream, self.replicas, self.offload = stream, replicas, offload
        super().__init__(policy, accelerator)

    def _place(self) -> None:
        policy, model = self.policy, self.policy.model
        if (why_not := why_not_shared(policy.family, model.config)) is not None:
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
        device, ranks = self.accelerator.device, self.accelerator.num_processes
        if self.replicas == 1:
            mesh = init_device_mesh(device.type, (ranks,))
        else:
            shape, names = (self.replicas, ranks // self.replicas), ("dp_replicate", "dp_shard")
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        is_pinned = device.type != "cpu"
        offload = CPUOffloadPolicy(pin_memory=is_pinned) if self.offload else OffloadPolicy()
        options = {"mesh": mesh, "ignored_params": ignored, "offload_policy": offload}
        layers = list(model.get_decoder().layers)
        held: list[Any] = [policy.root]
        if not ignored.issuperset(vision.parameters()):
            held.append(vision)
        if policy.autocast:
            # A layer's linear weights are gathered in the precision that autocast computes in.
            # Autocast leaves norms, and everything outside the layers, in float32.
            inner = [module for layer in layers for module in layer.modules()]
            others = [module for module in inner if not isinstance(module, nn.Linear)]
            norms = [module for module in others if any(True for _ in module.parameters(False))]
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
        for module in (*self.held, *self.streamed):
            # Losses are divided by the totals of all ranks: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        for module in (*self.held, *self.streamed):
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
        for module in (*self.held, *self.streamed):
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
        self._set_reduction(False)
        count = max(gather_object([len(batches)])) if self.stream else len(batches)
        yield from batches
        yield from [None] * (count - len(batches))
        if any(isinstance(weight, DTensor) for _, weight in self.trainable):
            self._set_reduction(True)
            yield None

    def _set_reduction(self, enabled: bool) -> None:
        for module in self.held:
            module.set_requires_gradient_sync(enabled, recurse=False)
            module.set_reshard_after_backward(enabled, recurse=False)

    def dummy_loss(self) -> Tensor:
        loss = self.policy.score(self.policy.dummy_batch()).logprobs.sum()
        for weight in self.policy.root.parameters():
            if weight.requires_grad and not isinstance(weight, DTensor):
                loss = loss + weight.sum()
        return 0 * loss


def build_strategy(policy: Policy, accelerator: Accelerator) -> Strategy:
    """Build the strategy that the launch requests, which distributes the policy's weights."""
    fsdp = get_fsdp_plugin(accelerator)
    if fsdp is not None:
        stream = bool(fsdp.reshard_after_forward)
        offload = isinstance(fsdp.cpu_offload, CPUOffloadPolicy)
        return FSDP(policy, accelerator, stream, get_dp_replicate_size(), offload)
    return Strategy(policy, accelerator)
