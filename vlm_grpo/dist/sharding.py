"""Conversion between full tensors and tensors sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True, eq=False)
class Deferred:
    """A full tensor that the ranks gather together once it is needed, all by ``full_tensor``.

    It stands for the shards of DeepSpeed, which have no type of their own, as a ``DTensor`` does
    for those of FSDP2."""

    shape: torch.Size
    dtype: torch.dtype
    full_tensor: Callable[[], Tensor]

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize


def find_layer(name: str) -> str:
    """Return the layer that a weight belongs to: its name up to the first number.

    >>> find_layer("model.layers.3.mlp.up_proj.weight"), find_layer("lm_head.weight")
    ('model.layers.3', 'lm_head.weight')
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is sharded by FSDP2 or is a weight sharded by ZeRO-3."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory; the full tensor if not sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)


def full_shape(tensor: Tensor) -> torch.Size:
    return getattr(tensor, "ds_shape", tensor.shape)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor, which every rank holds, like another tensor.

    ``like`` may be a tensor of FSDP2 (the result is a ``DTensor``), a weight of ZeRO-3 (the result
    is this rank's flat shard), or one that is not sharded (the result is ``value``)."""
    value = value.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    if not is_sharded(like):
        return value
    part = torch.zeros_like(local_shard(like), dtype=value.dtype)
    mine = value.flatten()[len(part) * distributed.get_rank() :][: len(part)]
    part[: len(mine)] = mine  # the last shards are padded to the length of the others
    return part


def unshard_like(part: Tensor, like: Tensor) -> Tensor | Deferred:
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
    if not is_sharded(like):
        return part
    return Deferred(full_shape(like), part.dtype, partial(_gather_flat, part, like))


def _gather_flat(part: Tensor, like: Tensor) -> Tensor:
    """Gather the full tensor of flat shards, which are sharded like a weight of ZeRO-3."""
    flat = part.new_empty(len(part) * distributed.get_world_size(), device=like.device)
    distributed.all_gather_into_tensor(flat, part.to(like.device))
    shape = full_shape(like)
    return flat[: shape.numel()].view(shape)


def gather_full(
    tensors: Mapping[str, Tensor | Deferred], keep: Container[str]
) -> dict[str, Tensor]:
    """Gather sharded tensors in host memory; the result has the names in ``keep``.

    All ranks must call it with the same names. Only one full tensor at a time is on the device.
    Names that share a tensor share it in the result too."""
    copies: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) in copies:
            continue
        full: Tensor = tensor  # type: ignore[assignment]
        if isinstance(tensor, DTensor | Deferred):
            with torch.no_grad():
                full = tensor.full_tensor()
            full = full.cpu() if name in keep else torch.empty(0)
        copies[id(tensor)] = full
    return {name: copies[id(tensor)] for name, tensor in tensors.items() if name in keep}
