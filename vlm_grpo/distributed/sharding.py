"""Tensors that are cut over ranks: made whole, and cut again."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a part of it: FSDP2's tensors, and the weights of ZeRO-3."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


def local_shard(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory: its shard, or all of a whole one."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape of the tensor without cuts."""
    return getattr(tensor, "ds_shape", tensor.shape)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has, cut as ``like`` is; with FSDP2 a
    tensor of such parts, and the value as it is where ``like`` is whole."""
    value = value.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    if not is_sharded(like):
        return value
    part = torch.zeros_like(local_shard(like), dtype=value.dtype)
    mine = value.flatten()[len(part) * distributed.get_rank() :][: len(part)]
    part[: len(mine)] = mine  # the last parts are filled up to the length of the others
    return part


def unshard_like(part: Tensor, like: Tensor) -> Tensor:
    """A tensor cut as ``like`` is, of which this rank holds ``part``; made whole with ZeRO-3."""
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
    flat = part.new_empty(len(part) * distributed.get_world_size(), device=like.device)
    distributed.all_gather_into_tensor(flat, part.to(like.device))
    shape = full_shape(like)
    return flat[: shape.numel()].view(shape).cpu()


def gather_full(tensors: Mapping[str, Tensor], keep: Container[str]) -> dict[str, Tensor]:
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
