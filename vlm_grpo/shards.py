"""Tensors that are cut over ranks: made whole, and cut again."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory: its shard, or all of a whole one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that every rank has, cut as ``like`` is; as it is where that is whole."""
    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def joined_like(part: Tensor, like: Tensor) -> Tensor:
    """A tensor cut as ``like`` is, of which this rank holds ``part``."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def whole(tensors: Mapping[str, Tensor], keep: Container[str]) -> dict[str, Tensor]:
    """The tensors without cuts, those that were cut in the host's memory.

    All ranks call it with the same names. One tensor at a time is whole on the device.

    Args:
        tensors: by name; names of one tensor share it in the result, too.
        keep: names that this rank wants; the result holds no others.
    """
    made: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and id(tensor) not in made:
            with torch.no_grad():
                full = tensor.full_tensor()
            made[id(tensor)] = full.cpu() if name in keep else torch.empty(0)
    return {name: made.get(id(it), it) for name, it in tensors.items() if name in keep}
