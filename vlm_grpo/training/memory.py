"""Memory usage and out-of-memory errors."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import psutil
import torch

logger = logging.getLogger(__name__)

GIB = 2**30


@dataclass
class TokenBudget:
    """The number of tokens to process at once, which is halved when memory runs out."""

    tokens: int | None
    setting: str  # name of the setting that holds its initial value

    @property
    def limit(self) -> int:
        """The number of tokens; one that no batch reaches if it is None."""
        return sys.maxsize if self.tokens is None else self.tokens

    def halve(self, used: int, minimum: int = 1) -> None:
        """Halve the budget, to ``minimum`` at least, after ``used`` tokens did not fit into the
        memory, and log the setting to start with.
        """
        self.tokens = max(min(self.limit, used) // 2, minimum)
        logger.warning(
            "out of memory: processing %d tokens at a time from now on; set %s=%d to start with "
            "this value",
            self.tokens,
            self.setting,
            self.tokens,
        )


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
