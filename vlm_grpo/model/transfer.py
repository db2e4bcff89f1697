"""Copies between the host and a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PINNED_BLOCK = 2**30  # bytes of a block of pinned memory


def copy_to(device: torch.device, array: np.ndarray | Tensor) -> Tensor:
    """Return the array as a tensor on ``device``, without waiting for the copy or the device."""
    tensor = torch.as_tensor(array)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # only copies from pinned memory do not wait
    return tensor.to(device, non_blocking=True)


def snapshot_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors in host memory, pinned for those on a GPU.

    The copies share blocks, because torch rounds each pinned block up to a power of two.
    """
    sizes = [-(-tensor.nbytes // 64) * 64 if tensor.is_cuda else 0 for tensor in tensors]
    block, end, left, copies = torch.empty(0, dtype=torch.uint8), 0, sum(sizes), []
    for tensor, size in zip(tensors, sizes, strict=True):
        if not tensor.is_cuda:
            copies.append(tensor.detach().to("cpu", copy=True))
            continue
        if end + size > len(block):
            bytes_ = max(size, min(left, PINNED_BLOCK))
            block, end = torch.empty(bytes_, dtype=torch.uint8, pin_memory=True), 0
        place = block[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(place.copy_(tensor.detach(), non_blocking=True))
        end, left = end + size, left - size
    if any(sizes):
        torch.cuda.synchronize()
    return copies
