"""The key-value cache of a rollout, with each prompt once and a place for each completion, and the
order in which completions get places.

A slot holds a prompt's keys and values, and a place those of one completion's tokens. Completions
of any prompts may take any places, so the place of a finished completion is free at once. The state
of a recurrent layer at the prompt's end is in the slot too, and is copied to each place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.attention import LayerState, PrefillAttention, RecurrentLayer
from vlm_grpo.model.engine.batch import LOGIT_BYTES, fit_tokens
from vlm_grpo.model.engine.forwards import Compiled
from vlm_grpo.model.engine.kernels import Layer
from vlm_grpo.model.families.family import RECURRENT_TYPES
from vlm_grpo.model.transfer import copy_to

Layers = dict[int, tuple[Tensor, ...]]
"""By layer: keys and values (rows, tokens, key heads, head width), or the tensors (rows, …) of a
recurrent state."""


@dataclass(frozen=True, eq=False)  # torch 2.11 hashes it while it compiles a step
class CachedKeys:
    """The cached keys that the queries of each of S rows see: the first ones, without gradient.

    The others are masked, except where one kernel reads only those of all rows (``SharedKeys``).

    Attributes:
        lengths: number of keys that each row sees, at least 1.
        longest: upper bound of the lengths.
        mask: -inf, or very small, where a row or one of its queries sees no key; None: every row
            sees ``longest``, or the kernel needs no mask.
    """

    lengths: Int[Tensor, " S"]
    longest: int
    mask: Float[Tensor, "S 1 #n longest"] | None = None

    @classmethod
    def build(
        cls, lengths: Int[Tensor, " S"], longest: int, are_equal: bool, like: Tensor
    ) -> CachedKeys:
        """Build the object for a cache such as ``like``; ``are_equal``: all lengths are longest."""
        if kernels.has_varlen(like):
            return cls(lengths.int(), longest)
        if are_equal:
            return cls(lengths, longest)
        hidden = torch.arange(longest, device=lengths.device) >= lengths[:, None, None, None]
        return cls(lengths, longest, _build_mask(hidden, like, -torch.inf))

    def starting_at(self, first: Int[Tensor, "S n"], like: Tensor) -> CachedKeys:
        """Return those of the keys that each of n queries of a row sees, from its first one on.

        The log-sum-exp of a query that sees none is so small that its output has no weight.
        """
        place = torch.arange(self.longest, device=first.device)
        hidden = (place < first[:, None, :, None]) | (place >= self.lengths[:, None, None, None])
        mask = _build_mask(hidden, like, torch.finfo(like.dtype).min / 2)
        return CachedKeys(self.lengths, self.longest, mask)

    def __call__(
        self,
        query: Float[Tensor, "S n key_heads width"],
        key: Float[Tensor, "S m key_heads width"],
        value: Float[Tensor, "S m key_heads width"],
        scaling: float,
        cap: float | None = None,
    ) -> tuple[Float[Tensor, "S n key_heads width"], Float[Tensor, "S n key_heads"]]:
        """Return the attention output and its log-sum-exps, in at least float32. The queries that
        share a key head are stacked along n."""
        key, value = key[:, : self.longest], value[:, : self.longest]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if kernels.is_cpu(query) and cap is None:
            output, lse = kernels.FLASH(q, k, v, attn_mask=self.mask, scale=scaling)
            return output.transpose(1, 2), lse.transpose(1, 2)
        scores = (q * scaling) @ k.mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        if self.mask is not None:
            scores += self.mask
        lse = scores.logsumexp(-1)
        output = (scores - lse[..., None]).exp().to(v.dtype) @ v
        return output.transpose(1, 2), lse.transpose(1, 2)


def _build_mask(hidden: Tensor, like: Tensor, value: float) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=hidden.device).masked_fill(hidden, value)


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
        """Give free places to waiting completions; return the slots that received a prompt, and the
        places that received a completion."""
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


class CacheSize(NamedTuple):
    """Numbers of prompts and of completions that a cache holds, and the most tokens of each."""

    slots: int
    places: int
    prompt_length: int
    completion_length: int

    def holds(self, other: CacheSize, max_tokens: int) -> bool:
        """Return whether a cache of this size serves for one of the other size: a larger one has at
        most ``max_tokens``."""
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

    Return all tokens, and for each of the shapes (rows, length) its part (rows, length, key heads,
    width)."""
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


class SharedKeys(NamedTuple):
    """The keys that sequences of queries see, first those of slots and then those of places, of a
    cache's joined tokens: the arguments of one kernel.

    The kernel computes the keys of a sequence one after the other. The prompts, which are long and
    few, are split into parts of equal length, each a sequence of its own, to keep a GPU busy
    (Flash-Decoding: Dao et al., 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
    """

    starts: tuple[Int[Tensor, " starts"], Int[Tensor, " starts"]]  # of queries and of keys
    longest: tuple[int, int]
    used: Int[Tensor, " sequences"]  # number of keys

    @classmethod
    def build(
        cls, cache: KVCache, queries: Sequence[int], visible: Sequence[CachedKeys], parts: int
    ) -> SharedKeys:
        """Build the object for numbers of queries of each part of a slot and of each place."""
        (prompts, own), size = visible, cache.size
        options: Any = {"dtype": torch.int32, "device": prompts.lengths.device}
        # Bounds of the parts of each prompt (S + 1, P).
        bounds = torch.arange(parts + 1, **options)[:, None] * prompts.lengths.int() // parts

        def list_starts(first: int, count: int, length: int) -> Int[Tensor, " count"]:
            return torch.arange(first, first + count * length, length, **options)

        count, hidden = parts * cache.slots, size.slots * size.prompt_length
        slots = list_starts(0, cache.slots, size.prompt_length)
        own_keys = list_starts(hidden, cache.places + 1, size.completion_length)
        own_queries = list_starts(count * queries[0], cache.places + 1, queries[1])
        starts = (
            torch.cat([list_starts(0, count, queries[0]), own_queries]),
            torch.cat([(bounds[:-1] + slots).flatten(), own_keys]),
        )
        longest = max(queries), max(-(-prompts.longest // parts), own.longest)
        return cls(starts, longest, torch.cat([bounds.diff(dim=0).flatten(), own.lengths.int()]))

    def __call__(
        self,
        query: Float[Tensor, "T key_heads width"],
        key: Float[Tensor, "K key_heads width"],
        value: Float[Tensor, "K key_heads width"],
        scaling: float,
    ) -> tuple[Float[Tensor, "T key_heads width"], Float[Tensor, "T key_heads"]]:
        tensors = query, key, value
        output, lse = kernels.run_varlen(
            *tensors, self.starts, self.longest, scaling, used=self.used
        )
        return output, lse.T


@Compiled
def _merge(
    output: Tensor,
    lse: Tensor,
    over_own: Tensor,
    own_lse: Tensor,
    from_seats: Tensor,
    lse_from_seats: Tensor,
) -> Float[Tensor, "R key_heads queries width"]:
    """Merge attention of seats, over each part of a prompt, and of places by their log-sum-exps."""
    over_own = over_own.transpose(1, 2)
    lse = lse.flatten(0, 1).index_select(0, lse_from_seats)
    output = output.flatten(0, 2).index_select(0, from_seats)
    if len(from_seats) == over_own.shape.numel() // over_own.shape[-1]:
        lse, output = lse.view_as(own_lse), output.view_as(over_own)
    else:
        lses = lse.view(-1, *own_lse.shape)
        lse = lses.logsumexp(0)
        shares = (lses - lse).exp().transpose(2, 3)[..., None]
        output = (output.view(-1, *over_own.shape) * shares).sum(0).to(output.dtype)
    share = (own_lse - lse).sigmoid_().to(output.dtype)
    # Not in place, which does not compile, and in one order, which a compiled ``lerp`` has not.
    return output.lerp(over_own, share.transpose(1, 2)[..., None]).contiguous()


class DecodeAttention:
    """Attention of the newest token of each completion to its prompt and its earlier tokens.

    The queries of a group are one sequence over the single copy of its prompt. That attention and
    each completion's over itself are merged by their log-sum-exps (see ``engine/attention.py``).

    Args:
        seats: what ``SlotScheduler.build_index`` returns of each pair of numbers of heads.
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
        thirds = (seats[first::3] for first in range(3))
        self.seats = dict(zip(cache.heads, zip(*thirds, strict=True), strict=True))
        self._visible: dict[Any, tuple[CachedKeys, CachedKeys]] = {None: visible}
        self._shared: dict[tuple[int, int], SharedKeys] = {}
        self.written = torch.arange(cache.places, device=fed.device), fed

    def __call__(
        self,
        layer: Layer,
        query: Float[Tensor, "R heads 1 width"],
        key: Float[Tensor, "R key_heads 1 width"],
        value: Float[Tensor, "R key_heads 1 width"],
    ) -> Float[Tensor, "R 1 heads width"]:
        heads = query.shape[1], key.shape[1]
        copied, from_seats, lse_from_seats = self.seats[heads]
        own_key, own_value = self.cache.completions[layer.index]
        places, key_heads = len(query), key.shape[1]
        own_key.index_put_(self.written, key[:, :, 0])
        own_value.index_put_(self.written, value[:, :, 0])

        # Each kernel of a decode step takes longer to start than to run.
        rows = query.reshape(places * heads[0], -1).index_select(0, copied)
        rows = rows.view(-1, key_heads, rows.shape[1])
        parts = self._attend(layer, rows, heads)
        output = _merge(*parts, from_seats, lse_from_seats)
        return output.view(places, 1, heads[0], -1)

    def _attend(
        self, layer: Layer, rows: Float[Tensor, "T key_heads width"], heads: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output (…, width) and the log-sum-exps (…, key heads) of the queries of each
        slot over its prompt, and of each place over its own tokens."""
        cache, parts = self.cache, len(self.seats[heads][1]) // (self.cache.places * heads[0])
        own = cache.places * heads[0] // heads[1]
        shapes = (parts * cache.slots, -1), (cache.places, own // cache.places)
        queries = rows.split([len(rows) - own, own])
        queries = [x.unflatten(0, shape) for x, shape in zip(queries, shapes, strict=True)]
        longest = cache.size.prompt_length + cache.size.completion_length
        if kernels.has_varlen(rows) and not layer.needs_mask(longest):
            if heads not in self._shared:
                counts = [x.shape[1] for x in queries]
                self._shared[heads] = SharedKeys.build(cache, counts, self._visible[None], parts)
            found = self._shared[heads](rows, *cache.joined[layer.index], layer.scaling)
            split = (x.split([len(rows) - own, own]) for x in found)
            (output, over_own), (lse, own_lse) = (
                (first.unflatten(0, shapes[0]), second.unflatten(0, shapes[1]))
                for first, second in split
            )
            return output, lse, over_own, own_lse
        prompts, completions = self._find_visible(layer, heads)
        options: Any = layer.scaling, layer.cap
        keys: Any = cache.prompts[layer.index]
        output, lse = prompts(queries[0], *keys, *options)
        own_keys: Any = cache.completions[layer.index]
        return output, lse, *completions(queries[1], *own_keys, *options)

    def recur(self, layer: int, run: RecurrentLayer, hidden: Tensor) -> Tensor:
        return run(hidden, self.cache.get_state(layer))

    def _find_visible(self, layer: Layer, heads: tuple[int, int]) -> tuple[CachedKeys, CachedKeys]:
        cache = self.cache
        longest = cache.size.prompt_length + cache.size.completion_length
        if not layer.needs_mask(longest):
            return self._visible[None]
        window = layer.window or longest
        if (window, heads) not in self._visible:
            prompts, completions = self._visible[None]
            own_first = self.fed + 1 - window
            count, key_heads = heads
            to_seats = self.seats[heads][0][: -cache.places * count]
            to_seats = to_seats.view(cache.slots, -1, count // key_heads, key_heads)
            first = own_first[to_seats[..., 0] // count] + self.prompt_lengths[:, None, None]
            like = cache.get_keys()
            self._visible[window, heads] = (
                prompts.starting_at(first.flatten(1), like),
                completions.starting_at(own_first[:, None], like),
            )
        return self._visible[window, heads]
