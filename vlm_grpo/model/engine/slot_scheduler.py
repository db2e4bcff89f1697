"""The order in which completions get places in the key-value cache of a rollout.

Completions of any prompts may take any places, so the place of a finished completion is free at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vlm_grpo.model.transfer import copy_to


class SlotScheduler:
    """Which completions are in the cache, and where; kept on the host.

    Completions get a place in order of their prompts, the longest first, as places become free. A
    prompt keeps its slot until all of its completions are finished.

    The rows of a prompt's completions, as many as its size, follow those of the prompt before.
    """

    def __init__(
        self, lengths: Int[np.ndarray, " prompts"], sizes: Sequence[int], slots: int, places: int
    ) -> None:
        self.lengths, self.group_size, ends = lengths, max(sizes), np.cumsum(sizes)
        # The prompt of each row, and the row's number among those of its prompt.
        self.owners = np.repeat(np.arange(len(sizes)), sizes)
        self.seats = np.arange(ends[-1]) - (ends - sizes)[self.owners]
        # The prompt in each slot, and the row of the completion in each place; −1: none.
        self.prompts: Int[np.ndarray, " slots"] = np.full(slots, -1)
        self.rows: Int[np.ndarray, " places"] = np.full(places, -1)
        # The number of tokens sampled for the completion in each place.
        self.ages: Int[np.ndarray, " places"] = np.zeros(places, dtype=np.int64)
        order = np.argsort(-lengths).tolist()
        self._waiting = [row for p in order for row in range(ends[p] - sizes[p], ends[p])]
        self._waiting.reverse()

    @property
    def is_empty(self) -> bool:
        return not self._waiting and bool((self.rows < 0).all())

    def admit(self) -> tuple[list[int], Int[np.ndarray, " n"]]:
        """Give free places to waiting completions; return the slots of the prompts that begin, and
        the places that were given."""
        started, taken = [], []
        for place in np.flatnonzero(self.rows < 0).tolist():
            if not self._waiting:
                break
            prompt = self.owners[self._waiting[-1]]
            if prompt not in self.prompts:
                free = np.flatnonzero(self.prompts < 0)
                if not len(free):
                    break
                self.prompts[free[0]] = prompt
                started.append(int(free[0]))
            self.rows[place] = self._waiting.pop()
            taken.append(place)
        return started, np.array(taken, dtype=np.int64)

    def find_slots(self, places: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        prompts = self.owners[self.rows[places]]
        return (prompts[:, None] == self.prompts).argmax(1)

    def release(self, is_active: Bool[np.ndarray, " N"]) -> None:
        """Free the places of finished completions, and the slots whose group is finished."""
        self.rows[~np.append(is_active, False)[self.rows]] = -1
        # Of the prompts that wait, only the first can have a slot.
        needed = np.append(self.rows[self.rows >= 0], self._waiting[-1:]).astype(int)
        self.prompts[~np.isin(self.prompts, self.owners[needed])] = -1

    def shrink(self, share: float) -> tuple[np.ndarray, np.ndarray] | None:
        """Give up empty slots and places once none waits and many places are empty.

        The numbers of slots and places are multiplied by ``share`` as often as their contents fit.
        Returns the slots and the places to keep, in their new order; None if nothing changes.
        """
        kept_slots, kept_places = _shrink(self.prompts, share), _shrink(self.rows, share)
        if self._waiting or len(kept_places) == len(self.rows):
            return None
        self.prompts = self.prompts[kept_slots]
        self.rows, self.ages = self.rows[kept_places], self.ages[kept_places]
        return kept_slots, kept_places

    def build_index(
        self, heads: Sequence[tuple[int, int]], device: torch.device, parts: int = 1
    ) -> tuple[Tensor, ...]:
        """Build the index of R places, P slots and G seats per slot, one for each completion of its
        group, whether it has a place or not; ``heads``: the layers' numbers of query and key heads;
        ``parts``: S, into which prompts are split.

        Returns the row of the completion in each place (R,), the sampler's spare row in empty
        ones; the number of tokens of the prompt in each slot (P,), at least S; and three tensors
        for each pair of numbers of heads: for each part, seat and head, and then for each place and
        head, the row of a (R·h, width) tensor to copy; for each part, place and head, that of a
        (S·P·G·h, width) tensor; for each part, place and query of a key head, that of a
        (S·P·G·h/k, k) tensor.
        """
        group, places = self.group_size, np.arange(len(self.rows))
        seats = self.find_slots(places) * group + self.seats[self.rows]
        seat_places = np.zeros(len(self.prompts) * group, dtype=np.int64)
        is_used = self.rows >= 0
        seat_places[seats[is_used]] = places[is_used]
        pairs: list[np.ndarray] = []
        for count, key_heads in heads:
            # Heads are ordered by key head, and in what is copied by query of a key head, so that
            # all queries of a key head are one sequence.
            order, times = np.arange(count).reshape(key_heads, -1).T.ravel(), count // key_heads
            copied = np.append(np.tile(seat_places, parts), places)
            pairs.append((copied[:, None] * count + order).ravel())
            every = np.add.outer(np.arange(parts) * len(seat_places), seats)[..., None]
            pairs.append((every * count + np.argsort(order)).ravel())
            pairs.append((every * times + np.arange(times)).ravel())
        rows = np.where(is_used, self.rows, len(self.owners))
        prompt_lengths = np.where(self.prompts >= 0, self.lengths[self.prompts], parts)
        return tuple(copy_to(device, array) for array in (rows, prompt_lengths, *pairs))


def _shrink(contents: np.ndarray, share: float) -> np.ndarray:
    used, size = np.flatnonzero(contents >= 0), len(contents)
    while int(size * share) >= max(len(used), 1):
        size = int(size * share)
    return np.append(used, np.flatnonzero(contents < 0))[:size]
