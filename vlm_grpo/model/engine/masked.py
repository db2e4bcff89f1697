"""Attention with a mask: of prompts that are not causal, and in sliding windows.

PyTorch's kernels compute it with any mask; a mask of the entire row is never built. Completions in
a sliding window need a copy of the end of their prompt, no longer than the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlm_grpo.model.engine.kernels import expand_heads, repack, unpack


def attend(
    query: Float[Tensor, "rows heads n width"],
    key: Float[Tensor, "rows key_heads m width"],
    value: Float[Tensor, "rows key_heads m width"],
    mask: Bool[Tensor, "n m"],
    scaling: float,
    cap: float | None = None,
) -> Float[Tensor, "rows heads n width"]:
    """Compute attention of each query to the keys for which the mask is True.

    With ``cap``, scores become cap · tanh(score / cap) (Gemma 2: 2024, arXiv:2408.00118), which
    no kernel computes.
    """
    key, value = expand_heads(query, key), expand_heads(query, value)
    if cap is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    scores = torch.tanh(query @ key.mT * (scaling / cap)) * cap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype) @ value


def build_window_mask(
    queries: int, keys: int, window: int | None, device: torch.device
) -> Bool[Tensor, "queries keys"]:
    """Return the mask of causal attention to the last ``window`` tokens, each token included.

    The last query belongs to the last key.
    """
    last = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= last) & (key > last - (window or keys))


def attend_in_window(
    query: Float[Tensor, "1 heads T width"],
    prefix: tuple[Float[Tensor, "1 key_heads P width"], Float[Tensor, "1 key_heads P width"]],
    own: tuple[Float[Tensor, "1 key_heads T width"], Float[Tensor, "1 key_heads T width"]],
    lengths: Sequence[int],
    window: int,
    scaling: float,
    cap: float | None = None,
) -> Float[Tensor, "1 heads T width"]:
    """Compute attention of completions to the last ``window`` tokens of prompt and completion.

    Args:
        query: queries of the T completion tokens.
        prefix: keys and values of the prompt.
        own: keys and values of the completion tokens.
        lengths: number of tokens of each completion; their sum is T.
        window: number of tokens that a token sees, itself included.
        scaling: factor on the dot products.
        cap: see ``attend``.
    """
    count, longest = len(lengths), max(lengths)
    seen = min(prefix[0].shape[2], window - 1)
    key, value = (
        torch.cat(
            [x[:, :, x.shape[2] - seen :].expand(count, -1, -1, -1), unpack(y, lengths)], dim=2
        )
        for x, y in zip(prefix, own, strict=True)
    )
    mask = build_window_mask(longest, seen + longest, window, query.device)
    output = attend(unpack(query, lengths), key, value, mask, scaling, cap)
    return repack(output, lengths)
