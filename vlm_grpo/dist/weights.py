"""A model's tensors over ranks: sent to all, sharded, gathered, and shared out for writing."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vlm_grpo.dist.balance import balance_by_cost


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


@torch.no_grad()
def gather_full(tensors: Mapping[str, Tensor], keep: Container[str]) -> dict[str, Tensor]:
    """Gather sharded tensors in host memory; the result has the names in ``keep``.

    All ranks must call it with the same names. Only one full tensor at a time is on the device.
    Names that share a tensor share it in the result too."""
    copies: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in copies:
            full = tensor
            if isinstance(tensor, DTensor):
                full = tensor.full_tensor()
                full = full.cpu() if name in keep else torch.empty(0)  # frees the device's
            copies[id(tensor)] = full
    return {name: copies[id(tensor)] for name, tensor in tensors.items() if name in keep}


def get_local_names(accelerator: Accelerator, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that this rank writes; ranks write similar amounts.

    Every tensor is written in full by one rank, so that any program can read the files. Names that
    share a tensor belong to one rank, and so do those of one layer, since files may store these as
    one tensor. Names and sizes must be equal on all ranks."""
    layers: dict[int, str] = {}  # of each tensor, by its first name
    costs: dict[str, int] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in layers:
            layer = layers[id(tensor)] = find_layer(name)
            costs[layer] = costs.get(layer, 0) + tensor.numel() * tensor.element_size()
    shares = balance_by_cost(list(costs.values()), accelerator.num_processes)
    own = {list(costs)[index] for index in shares[accelerator.process_index]}
    return {name for name, tensor in tensors.items() if layers[id(tensor)] in own}


def find_layer(name: str) -> str:
    """Return the layer that a weight belongs to: its name up to the first number.

    >>> find_layer("model.layers.3.mlp.up_proj.weight"), find_layer("lm_head.weight")
    ('model.layers.3', 'lm_head.weight')
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])
