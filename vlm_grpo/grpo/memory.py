"""How much memory a run holds."""

from __future__ import annotations

import psutil
import torch

GIB = 2**30


def memory_metrics(device: torch.device) -> dict[str, float]:
    """``memory/resident``, and on CUDA ``memory/cuda_peak`` since the last call; in GiB.

    Resident is what the process holds of the machine's memory now. The peak is of tensors, and
    is what has to fit into the device besides fragments and CUDA's own.
    """
    found = {"memory/resident": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        found["memory/cuda_peak"] = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return found


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed, on CUDA or (where it has no type of its own) on the CPU."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        "not enough memory" in text or "allocate memory" in text
    )
