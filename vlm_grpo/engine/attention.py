"""Attention in which the completions of a group share one prompt.

The language model runs unchanged. Its attention is dispatched, through transformers' attention
registry, to the object passed as ``attend``: ``Prefill`` notes the keys and values of whole
prompts, ``Decode`` lets every completion's newest token look at its prompt and at its own past,
``Packed`` scores rows ``[prompt | c1 | … | cG]``. Without ``attend`` it is plain SDPA.

In a packed row a token sees the tokens before it that belong to the prompt or to its own
completion. That is two attentions without any mask: all completion tokens over the prompt, and
each completion causally over itself, merged by their log-sum-exps. A softmax over a union of
keys is the mean of the softmaxes over its parts, weighted by their partition sums, so the merge
is exact; and the backward of each part needs only the merged output and log-sum-exp (the
identity that ring attention rests on: Liu et al., 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "shared_prefix"
"""The attention's name in transformers' registry."""

# PyTorch's CPU kernels that give the log-sum-exp along with the output.
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


SCORES_AT_ONCE = 2**24
"""Attention scores that are held at once where the products are plain ones."""


@runtime_checkable
class Attend(Protocol):
    """What the language model's attention layers are dispatched to."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attention output.

        Args:
            layer: index of the calling layer.
            query: (rows, heads, T, head width).
            key: (rows, key heads, T, head width); value likewise.
            scaling: factor on the dot products.

        Returns:
            (rows, T, heads, head width).
        """
        ...


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if attend is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast the rotation leaves queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _dispatch)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_shared_attention(language_model: Any) -> None:
    """Dispatch the attention of a transformers language model through ``attend``."""
    language_model.config._attn_implementation = NAME  # noqa: SLF001


def _expand_heads(query: Tensor, key: Tensor) -> Tensor:
    """Keys or values repeated for grouped-query attention, (rows, heads, T, head width)."""
    times = query.shape[1] // key.shape[1]
    return key if times == 1 else key.repeat_interleave(times, dim=1)


class Prefill:
    """Causal attention over whole prompts, padded on the right; keeps their keys and values.

    Padding needs no mask: it lies after every real token, which causal attention never sees.
    """

    def __init__(self) -> None:
        self.cache: list[tuple[Tensor, Tensor]] = []
        """For each layer, keys and values (prompts, key heads, T, head width)."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        self.cache.append((key, value))
        output = scaled_dot_product_attention(
            query,
            _expand_heads(query, key),
            _expand_heads(query, value),
            is_causal=True,
            scale=scaling,
        )
        return output.transpose(1, 2)


@dataclass(frozen=True)
class GroupSpan:
    """Where one group lies in a packed row: its prompt, then its completions.

    Attributes:
        start: index of the prompt's first token.
        prompt: number of prompt tokens.
        completions: number of tokens of each completion.
    """

    start: int
    prompt: int
    completions: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.prompt + sum(self.completions)


class Packed:
    """Attention over one row of groups, each ``[prompt | c1 | … | cG]``.

    Args:
        spans: where the groups lie; together they cover the row.
    """

    def __init__(self, spans: Sequence[GroupSpan]) -> None:
        self.spans = spans
        self.lengths = [n for span in spans for n in (span.prompt, sum(span.completions))]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        # Split, not sliced: the gradient of a slice is a tensor of the whole row's size.
        parts = zip(*(x.split(self.lengths, dim=2) for x in (query, key, value)), strict=True)
        outputs = []
        for span in self.spans:
            q, k, v = next(parts)
            whole = (q, _expand_heads(q, k), _expand_heads(q, v))
            outputs.append(scaled_dot_product_attention(*whole, is_causal=True, scale=scaling))
            qc, kc, vc = next(parts)
            if qc.shape[2]:
                attention = _cascade if _has_cascade(query) else _masked
                outputs.append(attention(qc, k, v, kc, vc, span.completions, scaling))
        return torch.cat(outputs, dim=2).transpose(1, 2)


def _has_cascade(query: Tensor) -> bool:
    # The log-sum-exp of an attention is public nowhere; CPU's kernel is the one we have tested.
    return query.device.type == "cpu"


def _masked(
    query: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scaling: float,
) -> Tensor:
    """The completions' attention with an explicit mask, for devices without the merged form."""
    device = query.device
    owner = torch.repeat_interleave(torch.tensor(lengths, device=device))
    order = torch.arange(len(owner), device=device)
    own = (owner[:, None] == owner[None]) & (order[:, None] >= order[None])
    prefix = own.new_ones(len(owner), prefix_key.shape[2])
    return scaled_dot_product_attention(
        query,
        _expand_heads(query, torch.cat([prefix_key, key], dim=2)),
        _expand_heads(query, torch.cat([prefix_value, value], dim=2)),
        attn_mask=torch.cat([prefix, own], dim=1),
        scale=scaling,
    )


def _cascade(
    query: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scaling: float,
) -> Tensor:
    """The completions' attention as two mask-free parts; arguments as in ``_masked``."""
    return _Cascade.apply(query, prefix_key, prefix_value, key, value, tuple(lengths), scaling)  # type: ignore[return-value]


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        prefix_key: Tensor,
        prefix_value: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        scaling: float,
    ) -> Tensor:
        stacked = _stack_heads(query, prefix_key)
        to_prefix, prefix_lse = _over_all(stacked, prefix_key, prefix_value, scaling)
        to_prefix, prefix_lse = to_prefix.reshape(query.shape), prefix_lse.reshape(query.shape[:3])
        own = (query, _expand_heads(query, key), _expand_heads(query, value))
        to_self, self_lse = _FLASH(
            *(_unpack(x, lengths) for x in own), is_causal=True, scale=scaling
        )
        to_self, self_lse = _repack(to_self, lengths), _repack(self_lse[..., None], lengths)
        prefix_lse = prefix_lse[..., None]
        lse = torch.logaddexp(prefix_lse, self_lse)
        output = to_prefix * (prefix_lse - lse).exp() + to_self * (self_lse - lse).exp()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, prefix_key, prefix_value, key, value, output, lse)
        ctx.lengths, ctx.scaling = lengths, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, prefix_key, prefix_value, key, value, output, lse = ctx.saved_tensors
        lengths, scaling = ctx.lengths, ctx.scaling
        grad = grad_outputs[0].contiguous()
        g, q, o, s = (_stack_heads(x, prefix_key) for x in (grad, query, output, lse))
        d_prefix = _over_all_backward(g, q, o, s, prefix_key, prefix_value, scaling)
        own = (grad, query, _expand_heads(query, key), _expand_heads(query, value), output, lse)
        g, q, k, v, o, s = (_unpack(x, lengths) for x in own)
        d_own = _FLASH_BACKWARD(g, q, k, v, o, s[..., 0], 0.0, True, scale=scaling)
        d_own_query, d_key, d_value = (_repack(x, lengths) for x in d_own)
        d_query = d_prefix[0].reshape(query.shape) + d_own_query
        d_key, d_value = _sum_heads(d_key, key), _sum_heads(d_value, value)
        return d_query, d_prefix[1], d_prefix[2], d_key, d_value, None, None


def _over_all(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention over all keys, and its log-sum-exp in float32.

    In bfloat16 the flash kernel for CPUs runs its products at the rate of float32; plain ones
    take a third of its time, and round the scores as transformers' eager attention does.

    Args:
        query: (rows, heads, n, width).
        key: (rows, heads, m, width); value likewise.

    Returns:
        (rows, heads, n, width) and (rows, heads, n).
    """
    if query.dtype != torch.bfloat16:
        return _FLASH(query, key, value, scale=scaling)
    outputs, sums = [], []
    for part in query.split(_rows_at_once(key), dim=2):
        weights, top = _weights(part, key, scaling)
        total = weights.sum(-1, keepdim=True, dtype=torch.float32)
        outputs.append((weights @ value / total).to(value.dtype))
        sums.append((total.log() + top)[..., 0])
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _over_all_backward(
    grad: Tensor,
    query: Tensor,
    output: Tensor,
    lse: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of a part, given the output and the log-sum-exp of the
    whole, (rows, heads, n, 1); other arguments as in ``_over_all``."""
    if query.dtype != torch.bfloat16:
        arguments = (grad, query, key, value, output, lse[..., 0], 0.0, False)
        return _FLASH_BACKWARD(*arguments, scale=scaling)
    d_queries, d_key, d_value = [], torch.zeros_like(key), torch.zeros_like(value)
    rows = _rows_at_once(key)
    for g, q, o, s in zip(*(x.split(rows, dim=2) for x in (grad, query, output, lse)), strict=True):
        weights, top = _weights(q, key, scaling)
        # The weights' share in the whole goes to the gradient, which is the smaller factor.
        g = g * (top - s).exp()
        mean = (g * o).sum(-1, keepdim=True)
        g = g.to(weights.dtype)
        d_value += weights.mT @ g
        d_scores = (g @ value.mT).sub_(mean).mul_(weights)
        d_queries.append(d_scores @ key * scaling)
        d_key += d_scores.mT @ (q * scaling)
    return torch.cat(d_queries, dim=2), d_key, d_value


def _weights(query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """``exp(scores - top)``, (rows, heads, n, m), and the largest score of each query."""
    scores = (query * scaling) @ key.mT
    top = scores.amax(-1, keepdim=True)
    return scores.sub_(top).exp_(), top


def _rows_at_once(key: Tensor) -> int:
    """Queries whose scores are held at once."""
    return max(1, SCORES_AT_ONCE // (key.shape[1] * key.shape[2]))


def _stack_heads(rows: Tensor, key: Tensor) -> Tensor:
    """Queries (1, heads, n, width) that share a key head, as rows of one matrix."""
    return rows.reshape(rows.shape[0], key.shape[1], -1, rows.shape[-1])


def _sum_heads(grad: Tensor, key: Tensor) -> Tensor:
    """The gradient of repeated keys, as that of the keys."""
    if grad.shape == key.shape:
        return grad
    return grad.reshape(*key.shape[:2], -1, *key.shape[2:]).sum(2)


def _unpack(packed: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(1, heads, sum of lengths, width) to (completions, heads, longest, width), zero-padded."""
    if len(set(lengths)) == 1:
        heads, width = packed.shape[1], packed.shape[3]
        return packed.view(heads, len(lengths), lengths[0], width).transpose(0, 1)
    rows = packed[0].transpose(0, 1).split(lengths)
    return pad_sequence(list(rows), batch_first=True).transpose(1, 2)


def _repack(padded: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The inverse of ``_unpack``."""
    rows = [row[:, :length] for row, length in zip(padded, lengths, strict=True)]
    return torch.cat(rows, dim=1)[None]
