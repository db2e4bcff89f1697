"""Copies from the host to a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def copy_to(device: torch.device, array: np.ndarray | Tensor) -> Tensor:
    """Return the array as a tensor on ``device``, without waiting for the copy or the device.

    Args:
        device: the device.
        array: an array, or a tensor on the host or on ``device``.
    """
    tensor = torch.as_tensor(array)
    if (
        device.type == "cuda" and tensor.device.type == "cpu"
    ):  # only copies from pinned memory do not wait
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
