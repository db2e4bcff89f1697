"""Attention to cached keys in a decode step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.model.engine import kernels, varlen


@dataclass(frozen=True)
class CachedKeys:
    """The cached keys that the queries of each of S rows see: the first ones, without gradient.

    On CUDA in half precision one kernel reads only those. Elsewhere the others are masked.

    Attributes:
        lengths: (S,) number of keys that each row sees, at least 1.
        longest: upper bound of the lengths.
        mask: (S, 1, 1 or n, longest) -inf, or very small, where a row or one of its queries sees no
            key; None: every row sees ``longest``, or the kernel needs no mask.
    """

    lengths: Int[Tensor, " S"]
    longest: int
    mask: Float[Tensor, "S 1 #n longest"] | None
    _starts: dict[int, Int[Tensor, " starts"]] = field(default_factory=dict)

    @classmethod
    def build(
        cls, lengths: Int[Tensor, " S"], longest: int, are_equal: bool, like: Tensor
    ) -> CachedKeys:
        """Build the object for a cache such as ``like``; ``are_equal``: all lengths are longest."""
        if varlen.has_varlen(like):
            return cls(lengths.int(), longest, None)
        if are_equal:
            return cls(lengths, longest, None)
        hidden = torch.arange(longest, device=lengths.device) >= lengths[:, None, None, None]
        zeros = torch.zeros((), dtype=like.dtype, device=lengths.device)
        return cls(lengths, longest, zeros.masked_fill(hidden, -torch.inf))

    def starting_at(self, first: Int[Tensor, "S n"], like: Tensor) -> CachedKeys:
        """Return those of the keys that each of n queries of a row sees, from its first one on.

        A query may see none. Its log-sum-exp is then so small that the output has no weight.
        """
        place = torch.arange(self.longest, device=first.device)
        hidden = (place < first[:, None, :, None]) | (place >= self.lengths[:, None, None, None])
        zeros = torch.zeros((), dtype=like.dtype, device=first.device)
        mask = zeros.masked_fill(hidden, torch.finfo(like.dtype).min / 2)
        return CachedKeys(self.lengths, self.longest, mask)

    @staticmethod
    def allocate(
        rows: int, length: int, like: Float[Tensor, "1 key_heads T width"]
    ) -> Float[Tensor, "rows length key_heads width"]:
        """Allocate a layer's keys or values, as zeros, in the memory order of the kernel."""
        _, heads, _, width = like.shape
        if kernels.is_cpu(like):
            return like.new_zeros(rows, heads, length, width).transpose(1, 2)
        return like.new_zeros(rows, length, heads, width)

    def __call__(
        self,
        query: Float[Tensor, "S n key_heads width"],
        key: Float[Tensor, "S m key_heads width"],
        value: Float[Tensor, "S m key_heads width"],
        scaling: float,
        cap: float | None = None,
    ) -> tuple[Float[Tensor, "S n key_heads width"], Float[Tensor, "S n key_heads"]]:
        """Return the attention output and its log-sum-exps, in at least float32.

        Every query of a key head sees the same keys, so grouped queries are stacked along n.
        """
        if self.mask is None and cap is None and varlen.has_varlen(query):
            starts = self._get_starts(query.shape[1]), self._get_starts(key.shape[1])
            return varlen.attend_cached(
                query, key, value, starts, (self.lengths, self.longest), scaling
            )
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

    def _get_starts(self, count: int) -> Int[Tensor, " starts"]:
        """Return the starts of S rows of ``count`` tokens and their end, the same in all layers."""
        if count not in self._starts:
            stop, device = len(self.lengths) * count + 1, self.lengths.device
            self._starts[count] = torch.arange(0, stop, count, dtype=torch.int32, device=device)
        return self._starts[count]
