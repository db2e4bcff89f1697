"""Data parallelism: every rank holds all weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vlm_grpo.dist.collectives import COLLECTIVES, split_into_buckets
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.model.engine.batch import MicroBatch
from vlm_grpo.model.families import find_part
from vlm_grpo.model.policy import Policy

OVERLAP_BYTES = 32 * 2**20
"""Size of the buckets of gradients: small enough that most are sent before the backward pass ends,
large enough to use the link well."""


class DataParallel(Strategy):
    """Data parallelism, which sums gradients while a step's last micro-batch computes others.

    A backward pass finishes the weights about in reverse order, so buckets hold them in that order,
    and last those of the vision tower, whose own backward passes follow. In the last micro-batch a
    bucket is sent once its gradients are finished and the buckets before it are sent; at the end of
    the step, all others. Every rank therefore sends the same buckets in the same order, also one
    without a micro-batch. A rank that runs out of memory and repeats its micro-batches gets the
    same gradients, and does not send a bucket again.
    """

    may_retry = True

    def __init__(self, policy: Policy, accelerator: Accelerator) -> None:
        super().__init__(policy, accelerator)
        late = {id(w) for name, w in self.trainable if find_part(name) in ("vision", "projector")}
        ordered = [weight for _, weight in reversed(self.trainable)]
        ordered.sort(key=lambda weight: id(weight) in late)
        self._buckets = split_into_buckets(ordered, OVERLAP_BYTES)
        self._sums: list[tuple[Tensor, Any]] = []
        """The buckets that are sent, in order, each with its exchange."""
        self._unfinished: list[set[int]] = []
        """The weights of each bucket without a final gradient; empty before the last pass."""
        if accelerator.num_processes > 1:
            for number, bucket in enumerate(self._buckets):
                for weight in bucket:
                    if id(weight) not in late:
                        weight.register_post_accumulate_grad_hook(partial(self._finish, number))

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        yield from batches[:-1]
        self._unfinished = [{id(weight) for weight in bucket} for bucket in self._buckets]
        yield from batches[-1:]

    def _finish(self, number: int, weight: Tensor) -> None:
        """Send the buckets that are complete with this weight, which is in bucket ``number``."""
        if not self._unfinished:
            return
        self._unfinished[number].remove(id(weight))  # an error if it has changed once more
        while len(self._sums) < len(self._buckets) and not self._unfinished[len(self._sums)]:
            self._send()

    def _send(self) -> None:
        """Start the sum of the next bucket, which takes the place of its gradients in memory."""
        bucket = self._buckets[len(self._sums)]
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        for weight in bucket:
            weight.grad = None
        self._sums.append((flat, torch.distributed.all_reduce(flat, async_op=True)))

    def reduce_gradients(self) -> None:
        if self.accelerator.num_processes == 1:
            super().reduce_gradients()
            return
        COLLECTIVES.count += 1
        while len(self._sums) < len(self._buckets):
            self._send()
        for bucket, (flat, exchange) in zip(self._buckets, self._sums, strict=True):
            exchange.wait()
            parts = flat.split([weight.numel() for weight in bucket])
            for weight, part in zip(bucket, parts, strict=True):
                weight.grad = part.view_as(weight)
        self._sums, self._unfinished = [], []

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._unfinished = []
