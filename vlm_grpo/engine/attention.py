"""Attention in which the completions of a group share one prompt.

The language model runs unchanged. Its attention is dispatched, through transformers' attention
registry, to the object passed as ``attend``: ``PrefillAttention`` notes the keys and values of
whole
prompts, ``DecodeAttention`` lets every completion's newest token look at its prompt and at its
own past,
``PackedAttention`` scores rows ``[prompt | c1 | … | cG]``. Without ``attend`` it is plain SDPA.

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
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vlm_grpo.engine import kernels

NAME = "shared_prefix"
"""The attention's name in transformers' registry."""


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


class PrefillAttention:
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
        return kernels.causal(query, key, value, scaling).transpose(1, 2)


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


class PackedAttention:
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
            outputs.append(kernels.causal(q, k, v, scaling))
            qc, kc, vc = next(parts)
            if qc.shape[2]:
                attention = kernels.cascade if kernels.has_cascade(query) else _masked
                outputs.append(attention(qc, k, v, kc, vc, span.completions, scaling))
        return torch.cat(outputs, dim=2).transpose(1, 2)


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
        kernels.expand_heads(query, torch.cat([prefix_key, key], dim=2)),
        kernels.expand_heads(query, torch.cat([prefix_value, value], dim=2)),
        attn_mask=torch.cat([prefix, own], dim=1),
        scale=scaling,
    )
