"""Communication between ranks, the errors it can raise, and tensors sharded over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState, utils
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vlm_grpo.errors import UserError

TensorT = TypeVar("TensorT", bound=Tensor)

BUCKET_BYTES = 256 * 2**20
"""Size of the buckets in which tensors are all-reduced: large enough to saturate the link, small
compared with a model."""


def gather_object(items: list[Any]) -> list[Any]:
    """Return the items of all ranks, in rank order. All ranks must call it."""
    return utils.gather_object(items)


@contextlib.contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Raise a ``UserError`` for a collective that failed because another process has died or is
    late."""
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


def get_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights and buffers by name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def broadcast_weights(
    model: nn.Module, whole: Mapping[str, Tensor], accelerator: Accelerator
) -> None:
    """Give all ranks the weights and buffers of the first one. All ranks must call it.

    The model's own may be sharded; ``whole`` are the first rank's unsharded ones, by name.
    """
    for name, tensor in get_tensors(model).items():
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=accelerator.device)
        if accelerator.is_main_process:
            values.copy_(whole[name])
        distributed.broadcast(values, 0)
        local_shard(tensor).copy_(local_shard(shard_like(values, tensor)))


def any_rank(ranks: Accelerator | PartialState, flag: bool) -> bool:
    if ranks.num_processes == 1:
        return flag
    flags = torch.tensor(float(flag), device=ranks.device)
    return bool(utils.reduce(flags, "sum") > 0)  # type: ignore[operator]


def balance_by_cost(costs: Sequence[int], world_size: int) -> list[list[int]]:
    """Return for each rank the indices, ascending, of items whose total costs are about equal.

    The most expensive remaining item goes to the rank with the lowest total so far (Graham's
    longest-processing-time rule, at most 4/3 of the optimum). The result depends on the arguments
    alone, so all ranks compute the same result without communication."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, 0, rank) for rank in range(world_size)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        cost, count, rank = min(loads)
        shares[rank].append(item)
        loads[rank] = (cost + costs[item], count + 1, rank)
    return [sorted(share) for share in shares]


def get_local_names(accelerator: Accelerator, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that this rank writes; ranks write similar amounts.

    Every tensor is written in full by one rank, so that any program can read the files. Names that
    share a tensor stay together, and so do those of a layer, which a model's files may join. Names
    and sizes must be equal on all ranks."""
    layers: dict[int, str] = {}  # of each tensor, by its first name
    costs: dict[str, int] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in layers:
            layer = layers[id(tensor)] = find_layer(name)
            costs[layer] = costs.get(layer, 0) + tensor.numel() * tensor.element_size()
    shares = balance_by_cost(list(costs.values()), accelerator.num_processes)
    own = {list(costs)[index] for index in shares[accelerator.process_index]}
    return {name for name, tensor in tensors.items() if layers[id(tensor)] in own}


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


# Full and sharded tensors.


def find_layer(name: str) -> str:
    """Return the layer that a weight belongs to: its name up to the first number.

    >>> find_layer("model.layers.3.mlp.up_proj.weight"), find_layer("lm_head.weight")
    ('model.layers.3', 'lm_head.weight')
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory; the full tensor if not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor, which every rank holds, like another tensor, if that is sharded."""
    value = value.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


def unshard_like(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor sharded like ``like`` whose local shard is ``part``."""
    if isinstance(like, DTensor):
        return DTensor.from_local(
            part.to(like.device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    return part


def gather_full(tensors: Mapping[str, Tensor], keep: Container[str]) -> dict[str, Tensor]:
    """Gather sharded tensors in host memory; the result has the names in ``keep``.

    All ranks must call it with the same names. Only one full tensor at a time is on the device.
    Names that share a tensor share it in the result too."""
    copies: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) in copies:
            continue
        full = tensor
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                full = tensor.full_tensor()
            full = full.cpu() if name in keep else torch.empty(0)
        copies[id(tensor)] = full
    return {name: copies[id(tensor)] for name, tensor in tensors.items() if name in keep}
