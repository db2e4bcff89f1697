"""The key-value cache of a rollout, with each prompt once and a place for each completion.

A slot holds a prompt's keys and values, and a place those of one completion's tokens. The state of
a recurrent layer at the prompt's end is in the slot too, and is copied to each place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.attention import LayerState, PrefillAttention
from vlm_grpo.model.engine.packing import LOGIT_BYTES, fit_tokens
from vlm_grpo.model.families.family import RECURRENT_TYPES
from vlm_grpo.model.transfer import copy_to

Layers = dict[int, tuple[Tensor, ...]]
"""By layer: keys and values (rows, tokens, key heads, head width), or the tensors (rows, …) of a
recurrent state."""


class CacheSize(NamedTuple):
    """Numbers of prompts and of completions that a cache holds, and the most tokens of each."""

    slots: int
    places: int
    prompt_length: int
    completion_length: int

    def holds(self, other: CacheSize, max_tokens: int) -> bool:
        """Return whether a cache of this size serves for the other: a larger one has at most
        ``max_tokens``."""
        tokens = self.slots * self.prompt_length + self.places * self.completion_length
        is_enough = all(a >= b for a, b in zip(self, other, strict=True))
        return self == other or (is_enough and tokens <= max_tokens)


class KVCache:
    """Keys and values of the prompts being decoded, and of their completions."""

    def __init__(self, size: CacheSize) -> None:
        self.size = size
        # What is stored of the prompt in each slot, and of the completion in each place.
        self.prompts: Layers = {}
        self.completions: Layers = {}
        # Tokens of both, (tokens, key heads, width), where one kernel reads them.
        self.joined: dict[int, tuple[Tensor, Tensor]] = {}
        self.heads: list[tuple[int, int]] = []  # as in ``PrefillAttention``
        self._memory: tuple[Layers, Layers] = ({}, {})
        self._states: dict[int, list[tuple[str, int]]] = {}  # names of a recurrent state's tensors
        self.restore(size.slots, size.places)

    def restore(self, slots: int, places: int) -> None:
        """Make the first slots and places available, and hide the others."""
        self.slots, self.places = slots, places
        self.prompts, self.completions = (
            {n: tuple(x if len(x) == count else x[:count] for x in xs) for n, xs in layers.items()}
            for layers, count in zip(self._memory, (slots, places), strict=True)
        )

    def count_bytes(self) -> int:
        return sum(x.nbytes for layers in self._memory for xs in layers.values() for x in xs)

    def get_keys(self) -> Tensor:
        """Return the prompts' keys in one of the attention layers."""
        return next(tensors[0] for i, tensors in self.prompts.items() if i not in self._states)

    def get_state(self, layer: int) -> LayerState:
        tensors = zip(self._states[layer], self.completions[layer], strict=True)
        return LayerState(dict(tensors), in_place=True)

    def store_prompts(
        self, slots: Sequence[int], prefill: PrefillAttention, tokens: Sequence[np.ndarray]
    ) -> None:
        """Store the ``tokens`` of a row, by their places in it, as the prompts of some slots."""
        if not self.prompts:
            self._allocate(prefill)
        device, lengths = self.get_keys().device, [len(places) for places in tokens]
        order = np.concatenate([np.arange(length) for length in lengths])
        places = copy_to(device, np.repeat(slots, lengths)), copy_to(device, order)
        source = copy_to(device, np.concatenate(tokens))
        for layer, keys in prefill.keys.items():
            for cached, new in zip(self.prompts[layer], keys, strict=True):
                cached.index_put_(places, new[0].transpose(0, 1)[source])
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
        """Undo what decode steps run inside do to recurrent states."""
        # Keys are written to the same place however often a step runs; a state moves on each time.
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
        size = self.size
        shapes = (size.slots, size.prompt_length), (size.places, size.completion_length)
        for number, (key, value) in like.keys.items():
            (keys, own_keys), (values, own_values) = (
                _allocate_keys(shapes, x) for x in (key, value)
            )
            self.joined[number] = keys, values
            for layers, *parts in zip(self._memory, own_keys, own_values, strict=True):
                layers[number] = tuple(parts)
        for layers, (rows, _) in zip(self._memory, shapes, strict=True):
            for number, (state, *_) in like.states.items():
                self._states[number] = list(state.tensors)
                layers[number] = tuple(
                    x.new_zeros(rows, *x.shape[1:]) for x in state.tensors.values()
                )
        self.restore(self.slots, self.places)


def _allocate_keys(shapes: Sequence[tuple[int, int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Allocate a layer's keys or values like those of a prompt, in the memory order of the kernel.

    Return all tokens, and their part (rows, length, key heads, width) for each (rows, length)."""
    _, heads, _, width = like.shape
    joined = like.new_zeros(sum(rows * length for rows, length in shapes), heads, width)
    parts = joined.split([rows * length for rows, length in shapes])
    if kernels.is_cpu(like):
        orders = [(rows, heads, length, width) for rows, length in shapes]
        pairs = zip(parts, orders, strict=True)
        return joined, [part.view(order).transpose(1, 2) for part, order in pairs]
    return joined, [part.view(*s, heads, width) for part, s in zip(parts, shapes, strict=True)]


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
    devices, and if the config does not report the size of keys, ``DEFAULT_ROLLOUT_TOKENS``.

    ``kept`` bytes are of a cache in memory, which the next rollout reuses or frees.
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
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    numbers, state = 0, 0
    for layer, kind in zip(layers, kinds, strict=True):
        if kind in RECURRENT_TYPES:
            state += _count_state(layer, dtype)
        else:
            width = getattr(layer, "head_dim", None)
            width = width or layer.hidden_size // layer.num_attention_heads
            key_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
            numbers += 2 * key_heads * width
    return numbers * dtype.itemsize, state


def _count_state(layer: Any, dtype: torch.dtype) -> int:
    # The inputs of a convolution have the precision ``dtype``; a gated-delta state is in float32.
    kernel = getattr(layer, "conv_L_cache", None)
    if kernel is not None:
        return layer.hidden_size * kernel * dtype.itemsize
    keys = layer.linear_num_key_heads * layer.linear_key_head_dim
    heads, width = layer.linear_num_value_heads, layer.linear_value_head_dim
    inputs = (2 * keys + heads * width) * layer.linear_conv_kernel_dim
    return inputs * dtype.itemsize + heads * layer.linear_key_head_dim * width * 4
