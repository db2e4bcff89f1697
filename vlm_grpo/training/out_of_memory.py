"""The number of tokens that are processed at once, and what lowers it."""

import logging
import sys
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass
class TokenBudget:
    """The number of tokens to process at once, which is halved when memory runs out."""

    tokens: int | None
    setting: str  # name of the setting that holds its initial value
    is_found: bool = True  # False: it is preliminary until a ``MemoryProbe`` has measured

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


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an allocation failed, on CUDA or on the CPU."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        "not enough memory" in text or "allocate memory" in text
    )
