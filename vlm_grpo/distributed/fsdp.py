"""Where a run's weights lie: whole on every rank, or cut into shards and gathered for use.

All placements make the same step. Each rank takes whole groups and runs as many micro-batches as
they make; what the ranks exchange is one sum of gradients a step, after the last micro-batch, and
with shards the weights themselves. Nothing of a rollout, an evaluation or a reference pass is
collective, so ranks with more, fewer or no groups, or without an image, never wait for each other
in the middle of a pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vlm_grpo.distributed.launch import sum_over_ranks
from vlm_grpo.distributed.optimizer import load_optimizer_tensors, optimizer_tensors
from vlm_grpo.engine.batch import MicroBatch
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy

T = TypeVar("T")


class DataParallel:
    """Every rank holds all weights; gradients are added up after a step's last micro-batch.

    Args:
        policy: its model is moved to the accelerator's device.
        accelerator: the ranks.

    Attributes:
        trainable: names and weights that are trained.
        optimizer: over them, once ``take`` was called.
        may_retry: a rank that runs out of memory may begin its micro-batches anew by itself.
    """

    may_retry = True

    def __init__(self, policy: Policy, accelerator: Accelerator) -> None:
        self.policy, self.accelerator = policy, accelerator
        self._place()
        self.trainable = policy.trainable_parameters()

    def _place(self) -> None:
        self.policy.model.to(self.accelerator.device)

    def take(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        """Train with an optimizer over ``trainable``.

        Args:
            optimizer: has made no step yet.
            max_norm: to which the gradient's norm over all weights is clipped; infinite: not.
        """
        self.optimizer, self.max_norm = optimizer, max_norm

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, passes without gradient need no other rank. All ranks enter and leave."""
        yield

    def release(self) -> None:
        """Drop gathered copies: the weights have changed, or are about to."""

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model, as ``Policy.weights``; cut, where weights are."""
        return self.policy.weights()

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        """The micro-batches to run forward and backward; None stands for an idle pass.

        The gradients' sum over all ranks is in ``trainable`` only after ``finish``.
        """
        yield from batches

    def dummy_loss(self) -> Tensor:
        """The loss of an idle pass: 0, with a gradient of 0 in every weight."""
        raise RuntimeError("weights that are not cut need no idle pass")

    def finish(self) -> None:
        """Add the gradients up over all ranks.

        A weight without a gradient has the gradient 0: skipping groups must change nothing, and
        AdamW moves weights whose gradient is 0 but not those that have none.
        """
        for _, weight in self.trainable:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        grads = [weight.grad for _, weight in self.trainable]
        sum_over_ranks(self.accelerator, [g for g in grads if not isinstance(g, DTensor)])  # type: ignore[misc]

    def step(self) -> float:
        """One step of the optimizer on the gradients of all ranks, which are dropped then.

        Returns:
            The norm they had before clipping. Where it is not finite, no weight has changed.
        """
        self.finish()
        norm = nn.utils.clip_grad_norm_([weight for _, weight in self.trainable], self.max_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        """Forget this rank's gradients so far."""
        for _, weight in self.trainable:
            weight.grad = None

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state, as the function of that name has it."""
        return optimizer_tensors(self.optimizer, self.trainable)

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what ``optimizer_tensors`` gave on any placement; every rank has it whole.

        Raises:
            UserError: it is the state of other weights.
        """
        load_optimizer_tensors(self.optimizer, self.trainable, tensors)


class _Scope(nn.Module):
    """The root that FSDP2 gathers around: everything done with the model is a call inside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], T]) -> T:
        return call()


_AUTOCAST = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
"""What autocast does to linear maps: bfloat16 from float32, and gradients summed in float32."""


def _is_norm(module: nn.Module) -> bool:
    """Whether the module has weights of its own that are no linear map's."""
    return not isinstance(module, nn.Linear) and any(True for _ in module.parameters(False))


class FSDP(DataParallel):
    """Every rank keeps 1/R of each weight, of its gradient and of the optimizer's state (FSDP2).

    For rollouts, evaluations and reference passes the weights are gathered once, so that decoding
    a token needs no other rank. In the update, with ``stream``, each layer of the language model
    is gathered when it is needed and dropped after, so that all ranks make as many passes as the
    one with the most micro-batches, the others idle ones; without, they stay gathered until the
    step's last pass. The embeddings, the head and a trained vision tower stay gathered in either
    case, and their gradients are added up in one last idle pass that all ranks make together: not
    every rank has an image in every pass.

    Adapters, and a vision tower that is frozen, are small and stay whole on every rank.

    With ``copies`` (hybrid sharding) R is the ranks that hold one copy: they follow each other in
    number, as those of one machine do. What is scattered is added up among the copies at once: held
    back until the step's end, torch 2.15 would scatter it again in every backward pass, also in
    those that not all ranks make.

    Args:
        policy: as for ``DataParallel``; its model is cut.
        accelerator: the ranks.
        stream: drop a layer's weights after each use in the update.
        copies: how many times the cut weights are there.

    Raises:
        UserError: the model's layers are not known, or ``rollout.cuda_graphs`` is set.
    """

    may_retry = False

    def __init__(
        self, policy: Policy, accelerator: Accelerator, stream: bool, copies: int = 1
    ) -> None:
        if policy.capture is not None:
            raise UserError(
                "rollout.cuda_graphs=true is not supported where weights are cut over ranks: "
                "leave it out"
            )
        self.stream, self.copies = stream, copies
        super().__init__(policy, accelerator)
        policy.run = self.scope

    def _place(self) -> None:
        policy, model = self.policy, self.policy.model
        why_not = policy.family.why_not_shared(model.config)
        if why_not is not None:
            raise UserError(
                f"FSDP needs to know the model's layers, and does not: {why_not}; launch with "
                "plain data parallelism"
            )
        vision = model.get_submodule(policy.family.parts["vision"][0].rstrip("."))
        ignored = set()
        if policy.adapters is not None:
            ignored = {weight for _, weight in policy.trainable_parameters()}
        if all(w in ignored or not w.requires_grad for w in vision.parameters()):
            ignored |= set(vision.parameters())
        options: dict[str, Any] = {
            "mesh": self._mesh(),
            "ignored_params": ignored,
        }
        layers = list(policy.family.language_model(model).layers)
        whole: list[Any] = [_Scope(model)]
        if not ignored.issuperset(vision.parameters()):
            whole.append(vision)
        if policy.autocast:
            # Autocast would gather in float32 what it computes in bfloat16. Of a layer that is the
            # linear maps; its norms, and all outside the layers, it leaves in float32.
            norms = [module for layer in layers for module in layer.modules() if _is_norm(module)]
            fully_shard(norms, reshard_after_forward=False, **options)
            whole.append(norms[0])
        for layer in layers:
            fully_shard(
                layer,
                reshard_after_forward=self.stream,
                mp_policy=_AUTOCAST if policy.autocast else MixedPrecisionPolicy(),
                **options,
            )
        for module in reversed(whole):  # the root last
            if not isinstance(module, FSDPModule):
                fully_shard(module, reshard_after_forward=False, **options)
        model.to(self.accelerator.device)  # buffers, and what is not cut
        self.scope = whole[0]
        self.streamed = layers if self.stream else []
        self.held = whole if self.stream else [*whole, *layers]
        for module in self._modules:
            # Losses are divided by the totals of all ranks: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def _mesh(self) -> DeviceMesh:
        kind, world = self.accelerator.device.type, self.accelerator.num_processes
        if self.copies == 1:
            return init_device_mesh(kind, (world,))
        shape = (self.copies, world // self.copies)
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
        if self.policy.adapters is not None:  # adapters are not cut
            return self.policy.weights()
        self.release()
        # A tied weight has several names and one tensor, which is written once.
        tied = dict(self.policy.model.named_parameters(remove_duplicate=False))
        return {name: tied.get(name, value) for name, value in self.policy.weights().items()}

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        for module in self.held:
            module.unshard()
            self._reduces(module, False)
        rounds = max(gather_object([len(batches)])) if self.stream else len(batches)
        yield from batches
        yield from [None] * (rounds - len(batches))
        if any(isinstance(weight, DTensor) for _, weight in self.trainable):
            for module in self.held:
                self._reduces(module, True)
            yield None

    @staticmethod
    def _reduces(module: FSDPModule, now: bool) -> None:
        """Whether the next backward pass adds the module's gradients up and cuts it again."""
        module.set_requires_gradient_sync(now, recurse=False)
        module.set_reshard_after_backward(now, recurse=False)

    def dummy_loss(self) -> Tensor:
        loss = self.policy.score(self.policy.dummy_batch()).logprobs.sum()
        for weight in self.scope.parameters():
            if weight.requires_grad and not isinstance(weight, DTensor):
                loss = loss + weight.sum()
        return 0 * loss
