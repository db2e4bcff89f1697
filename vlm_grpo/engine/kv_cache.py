"""The key-value cache of a rollout: each prompt once, and a place for each completion.

A slot holds a prompt's keys and values, and a place those of one completion's tokens. Completions
of any prompts may take any places, so the place of a finished completion is free at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.config.policy import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.engine.attention import PrefillAttention
from vlm_grpo.engine.kernels import CachedKeys
from vlm_grpo.families.transfer import copy_to

Layers = list[tuple[Tensor, Tensor]]
"""For each layer, keys and values (rows, tokens, key heads, head width)."""


class KVCache:
    """Keys and values of the prompts being decoded, and of their completions.

    Args:
        slots: number of prompts held at once.
        places: number of completions held at once.
        prompt_length: maximum number of tokens per prompt.
        completion_length: maximum number of tokens per completion.

    Attributes:
        size: the arguments.
        prompts: keys and values of the prompt in each slot.
        completions: keys and values of the completion in each place.
    """

    def __init__(self, slots: int, places: int, prompt_length: int, completion_length: int) -> None:
        self.size = slots, places, prompt_length, completion_length
        self.prompt_length, self.completion_length = prompt_length, completion_length
        self.prompts: Layers = []
        self.completions: Layers = []
        self._memory: tuple[Layers, Layers] = ([], [])
        self.restore()

    def restore(self) -> None:
        """Make all slots and places available again."""
        self.slots, self.places = self.size[:2]
        self.prompts, self.completions = (list(layers) for layers in self._memory)

    def count_bytes(self) -> int:
        """Return the memory that the cache takes."""
        layers = (layer for layers in self._memory for layer in layers)
        return sum(tensor.nbytes for layer in layers for tensor in layer)

    def store_prompts(self, slots: Sequence[int], prefill: PrefillAttention) -> None:
        """Store prefilled prompts in the given slots."""
        if not self.prompts:
            self._allocate(prefill.cache)
        index = copy_to(self.prompts[0][0].device, np.array(slots))
        for layer, prefilled in zip(self.prompts, prefill.cache, strict=True):
            for cached, new in zip(layer, prefilled, strict=True):
                cached[index, : new.shape[2]] = new.transpose(1, 2).to(cached.dtype)

    def keep(self, slots: Int[np.ndarray, " P"], places: Int[np.ndarray, " R"]) -> None:
        """Move these slots and places to the front, in place, and hide the others."""
        for layers, kept in (self.prompts, slots), (self.completions, places):
            index = copy_to(layers[0][0].device, kept)
            for number, layer in enumerate(layers):
                for cached in layer:
                    cached[: len(kept)] = cached[index]
                layers[number] = layer[0][: len(kept)], layer[1][: len(kept)]
        self.slots, self.places = len(slots), len(places)

    def _allocate(self, like: Layers) -> None:
        sizes = (self.slots, self.prompt_length), (self.places, self.completion_length)
        for layers, size in zip(self._memory, sizes, strict=True):
            for key, value in like:
                shape, dtype = (*size, key.shape[1], key.shape[3]), CachedKeys.storage_dtype(key)
                new = key.new_zeros(shape, dtype=dtype), value.new_zeros(shape, dtype=dtype)
                layers.append(new)
        self.restore()


LOGIT_BYTES = 5 * 4 + 2 * 8
"""Bytes per logit of a sampled token, besides the logit: copies in float32, and the order and sums
of the probabilities."""


def count_free_tokens(
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    completions: tuple[int, int],
    kept: int = 0,
) -> int:
    """Return the number of tokens for which a GPU has free memory, as in ``fit_tokens``; on other
    devices ``DEFAULT_ROLLOUT_TOKENS``.

    Args:
        config: the language model's config.
        device: the model's device.
        dtype: precision of the keys and logits.
        completions: number of completions, and maximum number of tokens per completion.
        kept: bytes of a cache in memory, which the next rollout reuses or frees.
    """
    if device.type != "cuda":
        return DEFAULT_ROLLOUT_TOKENS
    free, _ = torch.cuda.mem_get_info(device)
    free += kept + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * width
    place = config.vocab_size * (dtype.itemsize + LOGIT_BYTES)
    return fit_tokens(free, numbers * dtype.itemsize, place, completions)


def fit_tokens(memory: int, token: int, place: int, completions: tuple[int, int]) -> int:
    """Return the number of tokens whose keys and values fit into memory, with the logits of the
    completions sampled at once, and a fifth to spare for other activations.

    Args:
        memory: bytes of free memory; may be negative.
        token: bytes of a token's keys and values.
        place: bytes of a completion's logits.
        completions: number of completions, and maximum number of tokens per completion.
    """
    usable, (count, longest) = 0.8 * memory, completions
    # All completions at once, or as many as the tokens have places for.
    every, some = (usable - count * place) / token, usable / (token + place / longest)
    return max(0, int(max(every, some)))


class Seating:
    """Which completions are in the cache, and where; kept on the host.

    Completions are seated in order of their prompts, as places become free. A prompt keeps its slot
    until all of its completions are finished.

    Args:
        order: prompts in the order in which they are started.
        group_size: completions per prompt, G; those of prompt p are rows p·G … p·G+G−1.
        slots: number of slots.
        places: number of places.

    Attributes:
        prompts: the prompt in each slot; −1: none.
        rows: the row of the completion in each place; −1: none.
        ages: number of tokens sampled for the completion in each place.
    """

    def __init__(self, order: Sequence[int], group_size: int, slots: int, places: int) -> None:
        self.group_size = group_size
        self.prompts: Int[np.ndarray, " slots"] = np.full(slots, -1)
        self.rows: Int[np.ndarray, " places"] = np.full(places, -1)
        self.ages: Int[np.ndarray, " places"] = np.zeros(places, dtype=np.int64)
        self._waiting = [row for p in order for row in range(p * group_size, (p + 1) * group_size)]
        self._waiting.reverse()

    @property
    def is_empty(self) -> bool:
        """True if no completion is seated and none is waiting."""
        return not self._waiting and bool((self.rows < 0).all())

    def admit(self) -> tuple[list[int], Int[np.ndarray, " n"]]:
        """Seat waiting completions in free places.

        Returns:
            The slots that received a prompt, and the places that received a completion.
        """
        started, taken = [], []
        for place in np.flatnonzero(self.rows < 0).tolist():
            if not self._waiting:
                break
            prompt = self._waiting[-1] // self.group_size
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
        """Return the slot of the prompt of the completion in each of the given places."""
        prompts = self.rows[places] // self.group_size
        return (prompts[:, None] == self.prompts).argmax(1)

    def release(self, is_active: Bool[np.ndarray, " N"]) -> None:
        """Free the places of finished completions, and the slots whose group is finished."""
        self.rows[~np.append(is_active, False)[self.rows]] = -1
        # Of the prompts that wait, only the first can have a slot.
        needed = np.append(self.rows[self.rows >= 0], self._waiting[-1:]) // self.group_size
        self.prompts[~np.isin(self.prompts, needed)] = -1

    def shrink(self, share: float) -> tuple[np.ndarray, np.ndarray] | None:
        """Give up empty slots and places once none waits and many places are empty.

        The numbers of slots and places are multiplied by ``share`` as often as their contents fit.

        Returns:
            The slots and the places to keep, in their new order; None: nothing changes.
        """
        used = np.flatnonzero(self.rows >= 0)
        places = _shrink(len(self.rows), len(used), share)
        if self._waiting or places == len(self.rows):
            return None
        filled = np.flatnonzero(self.prompts >= 0)
        slots = _shrink(len(self.prompts), len(filled), share)
        kept_slots = np.append(filled, np.flatnonzero(self.prompts < 0))[:slots]
        kept_places = np.append(used, np.flatnonzero(self.rows < 0))[:places]
        self.prompts = self.prompts[kept_slots]
        self.rows, self.ages = self.rows[kept_places], self.ages[kept_places]
        return kept_slots, kept_places


def _shrink(size: int, used: int, share: float) -> int:
    while int(size * share) >= max(used, 1):
        size = int(size * share)
    return size


class SeatingIndex(NamedTuple):
    """The seating as index tensors on the device; R places, P slots, G seats per slot, h heads.

    A slot has a seat for each completion of its group, whether it has a place or not.

    Attributes:
        rows: row of the completion in each place; the sampler's spare row in empty places.
        prompt_lengths: number of tokens of the prompt in each slot, at least 1.
        to_seats: for each seat and head, the row of a (R·h, width) tensor to copy.
        from_seats: for each place and head, the row of a (P·G·h, width) tensor to copy.
    """

    rows: Int[Tensor, " R"]
    prompt_lengths: Int[Tensor, " P"]
    to_seats: Int[Tensor, " P*G*h"]
    from_seats: Int[Tensor, " R*h"]

    @classmethod
    def build(
        cls,
        seating: Seating,
        heads: tuple[int, int],
        lengths: Int[np.ndarray, " prompts"],
        device: torch.device,
    ) -> SeatingIndex:
        """Build the tensors.

        Args:
            seating: the seating.
            heads: number of query heads h, and of key heads.
            lengths: number of tokens of each prompt.
            device: the model's device.
        """
        group, (count, key_heads) = seating.group_size, heads
        places = np.arange(len(seating.rows))
        seats = seating.find_slots(places) * group + np.maximum(seating.rows, 0) % group
        seat_places = np.zeros(len(seating.prompts) * group, dtype=np.int64)
        is_used = seating.rows >= 0
        seat_places[seats[is_used]] = places[is_used]
        # Heads are ordered by key head in places, and by query of a key head in seats, where all
        # queries of a key head are one sequence.
        head = np.arange(count).reshape(key_heads, -1)
        to_seats = seat_places[:, None] * count + head.T.ravel()
        from_seats = seats[:, None] * count + np.argsort(head.T.ravel())
        spare = len(lengths) * group
        arrays = (
            np.where(is_used, seating.rows, spare),
            np.where(seating.prompts >= 0, lengths[seating.prompts], 1),
            to_seats.ravel(),
            from_seats.ravel(),
        )
        return cls(*(copy_to(device, array) for array in arrays))


class DecodeAttention:
    """Attention of the newest token of each completion to its prompt and its earlier tokens.

    The queries of a group are one sequence over the single copy of its prompt. That attention and
    each completion's over itself are merged by their log-sum-exps (see ``engine/attention.py``).

    Args:
        cache: the keys and values.
        seats: ``to_seats`` and ``from_seats`` of ``SeatingIndex``.
        fed: number of tokens of each completion that were fed before this one.
        visible: the keys of the prompts and, with this token's, of the completions.
    """

    def __init__(
        self,
        cache: KVCache,
        seats: tuple[Tensor, Tensor],
        fed: Int[Tensor, " R"],
        visible: tuple[CachedKeys, CachedKeys],
    ) -> None:
        self.cache, self.seats, self.visible = cache, seats, visible
        first = torch.arange(cache.places, device=fed.device) * cache.completion_length
        self.written = first + fed

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "R heads 1 width"],
        key: Float[Tensor, "R key_heads 1 width"],
        value: Float[Tensor, "R key_heads 1 width"],
        scaling: float,
    ) -> Float[Tensor, "R 1 heads width"]:
        (to_seats, from_seats), (prompts, completions) = self.seats, self.visible
        own_key, own_value = self.cache.completions[layer]
        dtype, places, heads, key_heads = own_key.dtype, *query.shape[:2], key.shape[1]
        own_key.flatten(0, 1).index_copy_(0, self.written, key[:, :, 0].to(dtype))
        own_value.flatten(0, 1).index_copy_(0, self.written, value[:, :, 0].to(dtype))

        rows = query.reshape(places * heads, -1).to(dtype)
        seats = rows.index_select(0, to_seats)
        seats = seats.view(self.cache.slots, -1, key_heads, rows.shape[1])
        over_prompt, prompt_lse = prompts(seats, *self.cache.prompts[layer], scaling)
        over_prompt = over_prompt.reshape_as(seats).flatten(0, 2)
        over_prompt = over_prompt.index_select(0, from_seats)
        prompt_lse = prompt_lse.flatten().index_select(0, from_seats)

        own = rows.view(places, key_heads, -1, rows.shape[1]).transpose(1, 2)
        over_own, own_lse = completions(own, own_key, own_value, scaling)
        over_own = over_own.transpose(1, 2).reshape_as(over_prompt)
        own_lse = own_lse.transpose(1, 2).flatten()
        share = (prompt_lse - own_lse).sigmoid_()[:, None].to(dtype)
        output = torch.lerp(over_own, over_prompt, share)
        return output.view(places, 1, heads, -1).to(value.dtype)
