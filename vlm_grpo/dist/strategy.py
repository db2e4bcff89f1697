"""The interface between a training step and the way its weights are distributed over ranks.

Every strategy computes the same step. Each rank takes complete groups and runs as many
micro-batches as they fill. Gradients are reduced once per step, after the last micro-batch (with
FSDP's ``stream``, in every pass). A rollout, an evaluation or a reference pass needs no
communication once the weights are gathered, so ranks with more, fewer or no groups, or without an
image, never wait for each other in the middle of a pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlm_grpo.dist.collectives import broadcast_weights, get_tensors, sum_over_ranks
from vlm_grpo.dist.optimizer import load_optimizer_tensors, optimizer_tensors
from vlm_grpo.dist.sharding import Deferred
from vlm_grpo.model.engine.batch import MicroBatch
from vlm_grpo.model.policy import Policy


class Strategy:
    """A way to distribute a policy's weights over ranks, and to reduce and apply its gradients.

    Attributes:
        trainable: names and values of the trained parameters.
        optimizer: the optimizer of ``trainable``, after ``attach_optimizer``.
        max_norm: maximum norm of the gradient over all weights; infinity disables clipping.
    """

    may_retry: bool  # True if a rank that runs out of memory may repeat its micro-batches alone

    def __init__(self, policy: Policy, accelerator: Accelerator) -> None:
        self.policy, self.accelerator = policy, accelerator
        whole = get_tensors(policy.model) if policy.one_reader else {}
        self._place()
        if policy.one_reader:
            broadcast_weights(policy.model, whole, accelerator)
        del whole
        self.trainable = policy.trainable_parameters()
        self.optimizer: torch.optim.Optimizer
        self.max_norm = math.inf

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
        return

    def weights(self) -> Mapping[str, Tensor | Deferred]:
        """Return the tensors of ``Policy.weights``, sharded where the strategy shards them."""
        return self.policy.weights()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of a step inside; reduce them over all ranks at the end."""
        yield
        self.reduce_gradients()

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        """Yield the micro-batches to run forward and backward, and None for a dummy pass, which
        this rank makes because the communication of other ranks needs it.
        """
        yield from batches

    def dummy_loss(self) -> Tensor:
        """Return the loss of a dummy pass: 0, with a zero gradient for every weight."""
        raise RuntimeError("this strategy makes no dummy passes")

    def reduce_gradients(self) -> None:
        """Sum the gradients over all ranks.

        A weight without a gradient gets a zero gradient: AdamW moves the weights whose gradient is
        zero, but not those without one, and skipping groups must not change the result.
        """
        for _, weight in self.trainable:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        grads = [weight.grad for _, weight in self.trainable]
        sum_over_ranks(self.accelerator, [g for g in grads if not isinstance(g, DTensor)])  # type: ignore[misc]

    def step(self) -> float:
        """Clip the reduced gradients, make one optimizer step, drop the gradients, and return their
        norm before clipping. If it is not finite, no weight has changed."""
        norm = nn.utils.clip_grad_norm_([weight for _, weight in self.trainable], self.max_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(norm):
            self.optimizer.step()
        self.drop_gradients()
        return norm

    def reset_optimizer(self) -> None:
        """Set the optimizer's state to that before its first step."""
        self.optimizer.state.clear()

    def drop_gradients(self) -> None:
        for _, weight in self.trainable:
            weight.grad = None

    def optimizer_tensors(self) -> Mapping[str, Tensor | Deferred]:
        """Return the optimizer's state in the form of the function ``optimizer_tensors``."""
        return optimizer_tensors(self.optimizer, self.trainable)

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what ``optimizer_tensors`` of any strategy returned, unsharded, on every rank."""
        load_optimizer_tensors(self.optimizer, self.trainable, tensors)
