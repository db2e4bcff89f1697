"""The endless, shuffled order in which training reads its examples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from vlm_grpo.types import Example


class ExampleStream:
    """Every example once an epoch, in an order of its own for each epoch.

    The stream is a pure function of its index: its position is one integer, so a resumed run
    goes on exactly where it stopped, and ranks agree without speaking to each other.

    Args:
        examples: at least one.
        seed: decides the order.
    """

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        self.examples, self.seed = examples, seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def __getitem__(self, index: int) -> Example:
        """The ``index``-th example drawn since the start of the run."""
        epoch, place = divmod(index, len(self.examples))
        return self.examples[self._order(epoch)[place]]

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
