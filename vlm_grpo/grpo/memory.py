"""Memory usage and out-of-memory errors."""

from __future__ import annotations

import psutil
import torch

GIB = 2**30


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory usage in GiB.

    ``memory/resident`` is the process's resident memory. On CUDA, ``memory/cuda_peak`` is the peak
    of allocated tensors since the last call; fragmentation and CUDA's own memory are not included.
    """
    metrics = {"memory/resident": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        metrics["memory/cuda_peak"] = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an allocation failed, on CUDA or on the CPU."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        "not enough memory" in text or "allocate memory" in text
    )
