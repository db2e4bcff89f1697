"""Communication between ranks, and the errors it can raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState, utils
from torch import Tensor

from vlm_grpo.errors import UserError

TensorT = TypeVar("TensorT", bound=Tensor)

BUCKET_BYTES = 256 * 2**20
"""Size of all-reduced buckets: large enough to saturate the link, small compared with a model."""


def gather_object(items: list[Any]) -> list[Any]:
    """Return the items of all ranks, in rank order. All ranks must call it."""
    return utils.gather_object(items)


@contextlib.contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Raise a ``UserError`` for a collective that failed because a process died or is late."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
        if not lost:
            raise
        raise UserError(
            "another process of this run has died, which the launcher reports with the reason, or "
            "the others waited for it longer than ddp_timeout. Finished checkpoints are intact: "
            "resume=true continues from the newest one"
        ) from error


@contextlib.contextmanager
def fail_together(ranks: Accelerator | PartialState) -> Iterator[None]:
    """Make all ranks raise if the block fails on one of them; the others raise ``UserError``."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = any_rank(ranks, failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise UserError("another process of this run has failed; its own message gives the reason")


def any_rank(ranks: Accelerator | PartialState, flag: bool) -> bool:
    if ranks.num_processes == 1:
        return flag
    flags = torch.tensor(float(flag), device=ranks.device)
    return bool(utils.reduce(flags, "sum") > 0)  # type: ignore[operator]


def sum_over_ranks(accelerator: Accelerator, tensors: Sequence[Tensor]) -> None:
    """All-reduce the tensors in place, many per collective; all ranks pass tensors of equal shapes.

    An adapter has hundreds of small tensors; one collective for each would be bound by latency.
    """
    if accelerator.num_processes == 1:
        return
    for bucket in split_into_buckets(tensors, BUCKET_BYTES):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        torch.distributed.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def split_into_buckets(tensors: Sequence[TensorT], size: int) -> list[list[TensorT]]:
    """Split the tensors, in order, into runs of one dtype and at most ``size`` bytes.

    A larger tensor has a bucket to itself.
    """
    buckets: list[list[TensorT]] = []
    room, dtype = 0, None
    for tensor in tensors:
        if tensor.nbytes > room or tensor.dtype != dtype:
            buckets.append([])
            room, dtype = size, tensor.dtype
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
