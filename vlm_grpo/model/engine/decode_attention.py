"""Attention of a decode step: of the newest token of each completion to the cached ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.attention import RecurrentLayer
from vlm_grpo.model.engine.forwards import Compiled
from vlm_grpo.model.engine.kernels import Layer
from vlm_grpo.model.engine.kv_cache import KVCache


@dataclass(frozen=True, eq=False)  # torch.compile (2.11) needs its hash
class CachedKeys:
    """The cached keys that the queries of each of S rows see: the first ones, without gradient.

    The others are masked, except where one kernel reads only those of all rows (``SharedKeys``).
    """

    lengths: Int[Tensor, " S"]  # number of keys that each row sees, at least 1
    longest: int  # upper bound of the lengths
    # -inf, or very small, where a row or one of its queries sees no key; None: every row sees
    # ``longest``, or the kernel needs no mask
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
        output, lse = kernels.run_varlen(
            query, key, value, self.starts, self.longest, scaling, used=self.used
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
    """

    def __init__(
        self,
        cache: KVCache,
        seats: Sequence[Tensor],  # of ``SlotScheduler.build_index``, by numbers of heads
        fed: Int[Tensor, " R"],  # number of tokens of each completion fed before this one
        prompt_lengths: Int[Tensor, " P"],  # number of tokens of the prompt in each slot
        visible: tuple[CachedKeys, CachedKeys],  # of prompts and, with this token's, of completions
    ) -> None:
        self.cache, self.fed, self.prompt_lengths = cache, fed, prompt_lengths
        self.longest = cache.size.prompt_length + cache.size.completion_length
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
        if kernels.has_varlen(rows) and not layer.needs_mask(self.longest):
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
        if not layer.needs_mask(self.longest):
            return self._visible[None]
        cache, window = self.cache, layer.window or self.longest
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
