"""The key-value cache of a rollout: each prompt once, and a place for each completion.

A slot holds a prompt's keys and values, and a place those of one completion's tokens. Completions
of any prompts may take any places, so the place of a finished completion is free at once. The state
of a recurrent layer at the prompt's end is in the slot too, and is copied to each place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.model.engine.attention import Layer, PrefillAttention
from vlm_grpo.model.engine.cached_keys import CachedKeys
from vlm_grpo.model.engine.limits import LOGIT_BYTES, fit_tokens
from vlm_grpo.model.engine.recurrence import (
    RECURRENT_TYPES,
    CachedState,
    RecurrentLayer,
    count_state,
)
from vlm_grpo.model.transfer import copy_to

Layers = dict[int, tuple[Tensor, ...]]
"""By layer: keys and values (rows, tokens, key heads, head width), or the tensors (rows, …) of a
recurrent state."""


class CacheSize(NamedTuple):
    """The size of a cache.

    Attributes:
        slots: number of prompts held at once.
        places: number of completions held at once.
        prompt_length: maximum number of tokens per prompt.
        completion_length: maximum number of tokens per completion.
    """

    slots: int
    places: int
    prompt_length: int
    completion_length: int

    def holds(self, other: CacheSize, max_tokens: int) -> bool:
        """Return whether a cache of this size serves for one of the other size, without more than
        ``max_tokens`` unless it is equal."""
        tokens = self.slots * self.prompt_length + self.places * self.completion_length
        is_enough = all(a >= b for a, b in zip(self, other, strict=True))
        return self == other or (is_enough and tokens <= max_tokens)


class KVCache:
    """Keys and values of the prompts being decoded, and of their completions.

    Args:
        size: the fields of ``CacheSize``.

    Attributes:
        size: the memory's size.
        slots: number of slots in use.
        places: number of places in use.
        prompts: what is stored of the prompt in each slot.
        completions: what is stored of the completion in each place.
        heads: numbers of query heads and key heads of the layers, without repetitions.
    """

    def __init__(self, *size: int) -> None:
        self.size = CacheSize(*size)
        self.prompt_length, self.completion_length = self.size[2:]
        self.prompts: Layers = {}
        self.completions: Layers = {}
        self.heads: list[tuple[int, int]] = []
        self._memory: tuple[Layers, Layers] = ({}, {})
        self._states: dict[int, list[tuple[str, int]]] = {}  # names of a recurrent state's tensors
        self.restore(*self.size[:2])

    def restore(self, slots: int, places: int) -> None:
        """Make the first slots and places available, and hide the others."""
        self.slots, self.places = slots, places
        self.prompts, self.completions = (
            {n: tuple(x if len(x) == count else x[:count] for x in xs) for n, xs in layers.items()}
            for layers, count in zip(self._memory, (slots, places), strict=True)
        )

    def count_bytes(self) -> int:
        """Return the memory that the cache takes."""
        layers = (tensors for layers in self._memory for tensors in layers.values())
        return sum(tensor.nbytes for tensors in layers for tensor in tensors)

    def get_keys(self) -> Tensor:
        """Return the prompts' keys in one of the attention layers."""
        return next(tensors[0] for i, tensors in self.prompts.items() if i not in self._states)

    def get_state(self, layer: int) -> CachedState:
        """Return the recurrent state of the completion in each place."""
        names = self._states[layer]
        return CachedState(dict(zip(names, self.completions[layer], strict=True)))

    def store_prompts(self, slots: Sequence[int], prefill: PrefillAttention) -> None:
        """Store prefilled prompts in the given slots."""
        if not self.prompts:
            self._allocate(prefill)
        device = self.get_keys().device
        lengths = [span.prompt_length for span in prefill.spans]
        tokens = np.concatenate([np.arange(length) for length in lengths])
        places = copy_to(device, np.repeat(slots, lengths)), copy_to(device, tokens)
        for layer, keys in prefill.keys.items():
            for cached, new in zip(self.prompts[layer], keys, strict=True):
                cached.index_put_(places, new[0].transpose(0, 1))
        index = copy_to(device, np.array(slots))
        for layer, states in prefill.states.items():
            for name, cached in zip(self._states[layer], self.prompts[layer], strict=True):
                cached.index_copy_(0, index, torch.cat([state.tensors[name] for state in states]))

    def fork(self, slots: Int[np.ndarray, " n"], places: Int[np.ndarray, " n"]) -> None:
        """Start the completions in the given places from the recurrent states of their prompts."""
        if not self._states:
            return
        to, origin = (copy_to(self.get_keys().device, index) for index in (places, slots))
        for layer in self._states:
            for state, prompt in zip(self.completions[layer], self.prompts[layer], strict=True):
                state.index_copy_(0, to, prompt.index_select(0, origin))

    @contextlib.contextmanager
    def keeping_states(self) -> Iterator[None]:
        """Undo what decode steps run inside do to recurrent states.

        Keys are written to the same place however often a step runs; a state moves on each time.
        """
        states = [state for layer in self._states for state in self.completions[layer]]
        before = [state.clone() for state in states]
        try:
            yield
        finally:
            for state, value in zip(states, before, strict=True):
                state.copy_(value)

    def keep(self, slots: Int[np.ndarray, " P"], places: Int[np.ndarray, " R"]) -> None:
        """Move these slots and places to the front, in place, and hide the others."""
        device = self.get_keys().device
        for layers, kept in (self.prompts, slots), (self.completions, places):
            index = copy_to(device, kept)
            for number, tensors in layers.items():
                for cached in tensors:
                    cached[: len(kept)] = cached[index]
                layers[number] = tuple(cached[: len(kept)] for cached in tensors)
        self.slots, self.places = len(slots), len(places)

    def _allocate(self, like: PrefillAttention) -> None:
        self.heads = like.heads
        sizes = self.size[::2], self.size[1::2]
        for layers, (rows, length) in zip(self._memory, sizes, strict=True):
            for number, keys in like.keys.items():
                layers[number] = tuple(CachedKeys.allocate(rows, length, x) for x in keys)
            for number, (state, *_) in like.states.items():
                self._states[number] = list(state.tensors)
                layers[number] = tuple(
                    x.new_zeros(rows, *x.shape[1:]) for x in state.tensors.values()
                )
        self.restore(self.slots, self.places)


def count_free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU's memory, and those that PyTorch holds for reuse."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def count_free_tokens(
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    completions: tuple[int, int],
    kept: int = 0,
) -> int:
    """Return the number of tokens for which a GPU has free memory, as in ``fit_tokens``; on other
    devices, and if the config does not tell the size of keys, ``DEFAULT_ROLLOUT_TOKENS``.

    Args:
        config: the language model's config.
        device: the model's device.
        dtype: precision of the keys and logits.
        completions: number of completions, and maximum number of tokens per completion.
        kept: bytes of a cache in memory, which the next rollout reuses or frees.
    """
    if device.type != "cuda":
        return DEFAULT_ROLLOUT_TOKENS
    free = kept + count_free_bytes(device)
    try:
        token, state = _count_bytes(config, dtype)
    except AttributeError:  # a configuration without the usual names
        return DEFAULT_ROLLOUT_TOKENS
    # A prompt has a state too, and captures of steps take a copy of the completions'.
    place = config.vocab_size * (dtype.itemsize + LOGIT_BYTES) + 2 * state
    return fit_tokens(free, token, place, completions)


def _count_bytes(config: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a token's keys and values, and of a row's recurrent states."""
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    numbers, state = 0, 0
    for layer, kind in zip(layers, kinds, strict=True):
        if kind in RECURRENT_TYPES:
            state += count_state(layer, dtype)
        else:
            width = getattr(layer, "head_dim", None)
            width = width or layer.hidden_size // layer.num_attention_heads
            key_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
            numbers += 2 * key_heads * width
    return numbers * dtype.itemsize, state


class DecodeAttention:
    """Attention of the newest token of each completion to its prompt and its earlier tokens.

    The queries of a group are one sequence over the single copy of its prompt. That attention and
    each completion's over itself are merged by their log-sum-exps (see ``engine/attention.py``).

    Args:
        cache: the keys and values.
        seats: ``seats`` of ``SeatingIndex``.
        fed: number of tokens of each completion that were fed before this one.
        prompt_lengths: number of tokens of the prompt in each slot.
        visible: the keys of the prompts and, with this token's, of the completions.
    """

    def __init__(
        self,
        cache: KVCache,
        seats: Sequence[Tensor],
        fed: Int[Tensor, " R"],
        prompt_lengths: Int[Tensor, " P"],
        visible: tuple[CachedKeys, CachedKeys],
    ) -> None:
        self.cache, self.fed, self.prompt_lengths = cache, fed, prompt_lengths
        self.seats = dict(zip(cache.heads, zip(seats[::2], seats[1::2], strict=True), strict=True))
        self._visible: dict[Any, tuple[CachedKeys, CachedKeys]] = {None: visible}
        self.written = torch.arange(cache.places, device=fed.device), fed

    def __call__(
        self,
        layer: Layer,
        query: Float[Tensor, "R heads 1 width"],
        key: Float[Tensor, "R key_heads 1 width"],
        value: Float[Tensor, "R key_heads 1 width"],
    ) -> Float[Tensor, "R 1 heads width"]:
        heads = query.shape[1], key.shape[1]
        to_seats, from_seats = self.seats[heads]
        prompts, completions = self._find_visible(layer, heads)
        own_key, own_value = self.cache.completions[layer.index]
        prompt_key, prompt_value = self.cache.prompts[layer.index]
        places, key_heads = len(query), key.shape[1]
        own_key.index_put_(self.written, key[:, :, 0])
        own_value.index_put_(self.written, value[:, :, 0])

        rows = query.reshape(places * heads[0], -1)
        seats = rows.index_select(0, to_seats)
        seats = seats.view(self.cache.slots, -1, key_heads, rows.shape[1])
        over_prompt, prompt_lse = prompts(seats, prompt_key, prompt_value, layer.scaling, layer.cap)
        over_prompt = over_prompt.reshape_as(seats).flatten(0, 2)
        over_prompt = over_prompt.index_select(0, from_seats)
        prompt_lse = prompt_lse.flatten().index_select(0, from_seats)

        own = rows.view(places, key_heads, -1, rows.shape[1]).transpose(1, 2)
        over_own, own_lse = completions(own, own_key, own_value, layer.scaling, layer.cap)
        over_own = over_own.transpose(1, 2).reshape_as(over_prompt)
        own_lse = own_lse.transpose(1, 2).flatten()
        share = (prompt_lse - own_lse).sigmoid_()[:, None].to(over_own.dtype)
        output = torch.lerp(over_own, over_prompt, share)
        return output.view(places, 1, heads[0], -1)

    def recur(self, layer: int, run: RecurrentLayer, hidden: Tensor) -> Tensor:
        """Run a recurrent layer over the newest tokens."""
        return run(hidden, self.cache.get_state(layer))

    def _find_visible(self, layer: Layer, heads: tuple[int, int]) -> tuple[CachedKeys, CachedKeys]:
        """Return the keys of the prompts and of the completions that the layer sees."""
        cache = self.cache
        longest = cache.prompt_length + cache.completion_length
        if not layer.needs_mask(longest):
            return self._visible[None]
        window = layer.window or longest
        if (window, heads) not in self._visible:
            prompts, completions = self._visible[None]
            own_first = self.fed + 1 - window
            count, key_heads = heads
            to_seats = self.seats[heads][0].view(cache.slots, -1, count // key_heads, key_heads)
            first = own_first[to_seats[..., 0] // count] + self.prompt_lengths[:, None, None]
            like = cache.get_keys()
            self._visible[window, heads] = (
                prompts.starting_at(first.flatten(1), like),
                completions.starting_at(own_first[:, None], like),
            )
        return self._visible[window, heads]
