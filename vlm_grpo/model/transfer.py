"""Copies between the host and a device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def copy_to(device: torch.device, array: np.ndarray | Tensor) -> Tensor:
    """Return the array as a tensor on ``device``, without waiting for the copy or the device."""
    tensor = torch.as_tensor(array)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # only copies from pinned memory do not wait
    return tensor.to(device, non_blocking=True)


def snapshot_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors in host memory, pinned for those on a GPU."""
    empty = (torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors)
    pairs = zip(empty, tensors, strict=True)
    copies = [copy.copy_(tensor.detach(), non_blocking=True) for copy, tensor in pairs]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return copies
