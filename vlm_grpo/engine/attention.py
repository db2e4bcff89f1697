"""Attention in which the completions of a group share one prompt.

The language model runs unchanged. Its attention layers are dispatched, through transformers'
attention registry, to the object passed as ``attend``: ``PrefillAttention`` stores the keys and
values of prompts, ``DecodeAttention`` lets each completion's newest token attend to its prompt and
to its previous tokens, ``PackedAttention`` scores rows ``[prompt | c1 | … | cG]``. Without
``attend`` the layers use plain SDPA.

In a packed row a token attends to the earlier tokens of its prompt and of its own completion. In
half precision on CUDA one kernel computes the row (``engine/varlen.py``). Elsewhere it takes two
attentions without any mask: all completion tokens over the prompt, and each completion causally
over itself, merged by their log-sum-exps. A softmax over a union of keys is the mean of
the softmaxes over its parts, weighted by their partition sums, so the merge is exact; and the
backward of each part needs only the merged output and log-sum-exp (as in ring attention: Liu et
al., 2023, arXiv:2310.01889).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vlm_grpo.engine import kernels, varlen
from vlm_grpo.engine.varlen import GroupSpan, VarlenPlan
from vlm_grpo.families import Family

ATTENTION_NAME = "shared_prefix"
"""Name of this attention in transformers' registry."""
SEGMENTS_NAME = "flash_segments"
"""Name of the vision tower's. Only to names with "flash" transformers passes segments undivided."""


@runtime_checkable
class AttentionFunction(Protocol):
    """The computation that the language model's attention layers are dispatched to."""

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "rows heads T width"],
        key: Float[Tensor, "rows key_heads T width"],
        value: Float[Tensor, "rows key_heads T width"],
        scaling: float,
    ) -> Float[Tensor, "rows T heads width"]:
        """Return the attention output.

        Args:
            layer: index of the calling layer.
            query: queries.
            key: keys.
            value: values.
            scaling: factor on the dot products.
        """
        ...


def _dispatch(
    module: nn.Module,
    query: Float[Tensor, "rows heads T width"],
    key: Float[Tensor, "rows key_heads S width"],
    value: Float[Tensor, "rows key_heads S width"],
    attention_mask: Tensor | None,
    scaling: float,
    attend: AttentionFunction | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows T heads width"], Tensor | None]:
    if attend is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    # Under autocast the rotation leaves queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


def _dispatch_segments(
    module: nn.Module,
    query: Float[Tensor, "1 heads T width"],
    key: Float[Tensor, "1 heads T width"],
    value: Float[Tensor, "1 heads T width"],
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: Int[Tensor, " starts"],
    max_length_q: int | tuple[int, ...],
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 T heads width"], None]:
    """Compute attention within segments, by their lengths or, if only the longest is given, their
    starts, which are then read from the device."""
    if not isinstance(max_length_q, tuple):
        max_length_q = tuple(cu_seq_lens_q.diff().tolist())
    if varlen.has_varlen(query):
        longest = max(max_length_q)
        rows = (query, key, value)
        return varlen.attend_in_segments(*rows, cu_seq_lens_q, longest, scaling), None
    return kernels.segments(query, key, value, max_length_q, scaling), None


AttentionInterface.register(ATTENTION_NAME, _dispatch)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
AttentionInterface.register(SEGMENTS_NAME, _dispatch_segments)


def use_shared_attention(family: Family, model: Any) -> None:
    """Dispatch the attention of a transformers model through this module.

    The language model's goes through ``attend``. The vision tower's images, or windows of images,
    are computed together.
    """
    family.language_model(model).config._attn_implementation = ATTENTION_NAME  # noqa: SLF001
    for layer in family.vision_layers(model):
        # A copy: transformers builds no model from a configuration that names an unknown kernel.
        layer.config = copy.copy(layer.config)
        layer.config._attn_implementation = SEGMENTS_NAME  # noqa: SLF001


class PrefillAttention:
    """Causal attention over prompts padded on the right, whose keys and values are stored.

    Padding needs no mask: it follows every real token, and causal attention never looks ahead.
    """

    def __init__(self) -> None:
        self.cache: list[tuple[Tensor, Tensor]] = []
        """For each layer, keys and values (prompts, key heads, T, head width)."""

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "prompts heads T width"],
        key: Float[Tensor, "prompts key_heads T width"],
        value: Float[Tensor, "prompts key_heads T width"],
        scaling: float,
    ) -> Float[Tensor, "prompts T heads width"]:
        self.cache.append((key, value))
        return kernels.causal(query, key, value, scaling).transpose(1, 2)


class PackedAttention:
    """Attention over one row of groups, each ``[prompt | c1 | … | cG]``.

    Args:
        spans: the groups' locations; together they cover the row.
    """

    def __init__(self, spans: Sequence[GroupSpan]) -> None:
        self.spans = spans
        self._plan: VarlenPlan | None = None
        self._lengths = [
            n for span in spans for n in (span.prompt_length, sum(span.completion_lengths))
        ]

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "1 heads T width"],
        key: Float[Tensor, "1 key_heads T width"],
        value: Float[Tensor, "1 key_heads T width"],
        scaling: float,
    ) -> Float[Tensor, "1 T heads width"]:
        if varlen.has_varlen(query):
            self._plan = self._plan or VarlenPlan.build(self.spans, query.device)
            return self._plan.attend(query, key, value, scaling)
        # Split, not sliced: the gradient of a slice has the size of the entire row.
        parts = zip(*(x.split(self._lengths, dim=2) for x in (query, key, value)), strict=True)
        outputs = []
        for span in self.spans:
            q, k, v = next(parts)
            outputs.append(kernels.causal(q, k, v, scaling))
            qc, kc, vc = next(parts)
            if qc.shape[2]:
                lengths = span.completion_lengths
                outputs.append(kernels.cascade(qc, k, v, kc, vc, lengths, scaling))
        return torch.cat(outputs, dim=2).transpose(1, 2)
