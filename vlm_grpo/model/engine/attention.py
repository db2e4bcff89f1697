"""Attention in which the completions of a group share one prompt.

The language model runs unchanged. Its attention layers are dispatched, through transformers'
attention registry, to the object passed as ``attend``, which gets the layer and its queries, keys
and values (rows, heads, T, width) and returns (rows, T, heads, width): ``PrefillAttention`` stores
the keys and values of prompts, ``DecodeAttention`` lets each completion's newest token attend to
its prompt and to its previous tokens, ``PackedAttention`` scores rows ``[prompt | c1 | … | cG]``.
Without ``attend`` the layers use plain SDPA. Layers with a recurrent state instead of attention
are dispatched to its method ``recur`` (``engine/recurrence.py``).

In a packed row a token attends to the earlier tokens of its prompt and of its own completion. In
half precision on CUDA one kernel computes the row (``engine/varlen.py``). Elsewhere it takes two
attentions without any mask: all completion tokens over the prompt, and each completion causally
over itself, merged by their log-sum-exps. A softmax over a union of keys is the mean of
the softmaxes over its parts, weighted by their partition sums, so the merge is exact; and the
backward of each part needs only the merged output and log-sum-exp (as in ring attention: Liu et
al., 2023, arXiv:2310.01889).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vlm_grpo.model.engine import kernels, varlen
from vlm_grpo.model.engine.recurrence import LayerState, RecurrentLayer, share_recurrent_layers
from vlm_grpo.model.engine.varlen import GroupSpan, VarlenPlan
from vlm_grpo.model.families import Family
from vlm_grpo.model.families.family import ALL_LAYERS, Masks

ATTENTION_NAME = "shared_prefix"
"""Name of this attention in transformers' registry."""
SEGMENTS_NAME = "flash_segments"
"""Name of the vision tower's attention. transformers passes segments undivided only to attention
with "flash" in its name."""


@contextlib.contextmanager
def plain_attention(family: Family, model: Any) -> Iterator[None]:
    """Use transformers' own attention inside."""
    language_model = family.language_model(model)
    config = language_model.config
    if config._attn_implementation != ATTENTION_NAME:  # noqa: SLF001
        yield
        return
    name = "sdpa" if language_model._supports_sdpa else "eager"  # noqa: SLF001
    used, config._attn_implementation = config._attn_implementation, name  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation = used  # noqa: SLF001


class Layer(NamedTuple):
    """An attention layer of the language model."""

    index: int
    kind: str
    """Its type in transformers' configuration."""
    scaling: float
    """Factor on the dot products."""
    window: int | None = None
    """Number of tokens that each token sees, itself included; None: all."""
    cap: float | None = None
    """Scores become cap · tanh(score / cap); None: they stay."""

    def needs_mask(self, length: int) -> bool:
        """Return whether the kernels without a mask cannot compute rows of ``length`` tokens."""
        return self.cap is not None or (self.window is not None and self.window < length)


def _dispatch(
    module: nn.Module,
    query: Float[Tensor, "rows heads T width"],
    key: Float[Tensor, "rows key_heads S width"],
    value: Float[Tensor, "rows key_heads S width"],
    attention_mask: Tensor | None,
    scaling: float,
    attend: Any = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "rows T heads width"], Tensor | None]:
    if attend is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    index: Any = module.layer_idx
    kinds = getattr(module.config, "layer_types", None)
    kind = "full_attention" if kinds is None else kinds[index]
    # Under autocast the rotation leaves queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    layer = Layer(index, kind, scaling, sliding_window, softcap)
    return attend(layer, query, key, value), None


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
    if not isinstance(max_length_q, tuple):  # only the longest: read the starts from the device
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
    """Dispatch a model's attention, and its recurrent layers, through this module.

    The vision tower's images, or windows of images, are computed together.
    """
    language_model = family.language_model(model)
    language_model.config._attn_implementation = ATTENTION_NAME  # noqa: SLF001
    share_recurrent_layers(language_model)
    for layer in family.vision_layers(model):
        # A copy: transformers builds no model from a configuration that names an unknown kernel.
        layer.config = copy.copy(layer.config)
        layer.config._attn_implementation = SEGMENTS_NAME  # noqa: SLF001


class PackedAttention:
    """Attention over one row of groups, each ``[prompt | c1 | … | cG]``, that the spans cover.

    ``masks`` has each group's masks of layers in which its prompt is not causal (``PromptLayout``).
    """

    def __init__(self, spans: Sequence[GroupSpan], masks: Sequence[Masks] | None = None) -> None:
        self.spans, self.masks = spans, masks or [{}] * len(spans)
        self._plan: VarlenPlan | None = None
        self._lengths = [
            n for span in spans for n in (span.prompt_length, sum(span.completion_lengths))
        ]
        self._longest = max(s.prompt_length + max(s.completion_lengths, default=0) for s in spans)

    def __call__(
        self,
        layer: Layer,
        query: Float[Tensor, "1 heads T width"],
        key: Float[Tensor, "1 key_heads T width"],
        value: Float[Tensor, "1 key_heads T width"],
    ) -> Float[Tensor, "1 T heads width"]:
        masks = [find_mask(masks, layer.kind) for masks in self.masks]
        row: Tensor | None = None
        if varlen.has_varlen(query) and layer.cap is None:
            self._plan = self._plan or VarlenPlan(self.spans, query.device)
            row = self._plan.attend(query, key, value, layer.scaling, layer.window)
            if all(mask is None for mask in masks):
                return row
            row = row.transpose(1, 2)
        # Split, not sliced: the gradient of a slice has the size of the entire row.
        tensors = (query, key, value) if row is None else (query, key, value, row)
        parts = zip(*(x.split(self._lengths, dim=2) for x in tensors), strict=True)
        outputs = []
        for span, mask in zip(self.spans, masks, strict=True):
            prompt, completions = next(parts), next(parts)
            if row is None or mask is not None:
                outputs.append(_attend_prompt(layer, prompt[:3], mask))
            else:
                outputs.append(prompt[3])
            if row is not None:
                outputs.append(completions[3])
            elif completions[0].shape[2]:
                lengths = span.completion_lengths
                outputs.append(_attend_completions(layer, prompt, completions, lengths))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def recur(self, layer: int, run: RecurrentLayer, hidden: Tensor) -> Tensor:
        """Run a recurrent layer over each prompt, and from its state over the completions."""
        parts = iter(hidden.split(self._lengths, dim=1))
        outputs = []
        for span in self.spans:
            state = LayerState()
            outputs.append(run(next(parts), state))
            self.keep_state(layer, state)
            completions, lengths = next(parts), span.completion_lengths
            if completions.shape[1]:
                rows = pad_sequence(list(completions[0].split(lengths)), batch_first=True)
                if rows.shape[1] == 1:  # kernels for single tokens have no gradient
                    rows = nn.functional.pad(rows, (0, 0, 0, 1))
                rows = run(rows, state.fork(len(rows)))
                kept = [row[:length] for row, length in zip(rows, lengths, strict=True)]
                outputs.append(torch.cat(kept)[None])
        return torch.cat(outputs, dim=1)

    def keep_state(self, layer: int, state: LayerState) -> None:
        """Receive the state of a recurrent layer at the end of a prompt."""


def _attend_prompt(layer: Layer, prompt: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    query, key, value = prompt
    length = query.shape[2]
    if mask is None and not layer.needs_mask(length):
        return kernels.causal(query, key, value, layer.scaling)
    if mask is None:
        mask = kernels.build_window_mask(length, length, layer.window, query.device)
    return kernels.attend_masked(query, key, value, mask, layer.scaling, layer.cap)


def _attend_completions(
    layer: Layer, prompt: Sequence[Tensor], own: Sequence[Tensor], lengths: Sequence[int]
) -> Tensor:
    (_, prompt_key, prompt_value), (query, key, value) = prompt, own
    if not layer.needs_mask(prompt_key.shape[2] + max(lengths)):
        tensors = (query, prompt_key, prompt_value, key, value)
        return kernels.cascade(*tensors, lengths, layer.scaling)
    window = layer.window or prompt_key.shape[2] + max(lengths)
    tensors = (query, (prompt_key, prompt_value), (key, value))
    return kernels.attend_in_window(*tensors, lengths, window, layer.scaling, layer.cap)


class PrefillAttention(PackedAttention):
    """Attention over a row of prompts, which stores their keys, values and recurrent states."""

    def __init__(self, spans: Sequence[GroupSpan], masks: Sequence[Masks] | None = None) -> None:
        super().__init__(spans, masks)
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of each attention layer: (1, key heads, T, head width)."""
        self.states: dict[int, list[LayerState]] = {}
        """The state of each recurrent layer at the end of each prompt."""
        self.heads: list[tuple[int, int]] = []
        """Numbers of query heads and key heads of the layers, without repetitions."""

    def __call__(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # A part of a larger product would keep all of it.
        is_part = value.untyped_storage().nbytes() > value.nbytes
        self.keys[layer.index] = key, value.clone() if is_part else value
        heads = query.shape[1], key.shape[1]
        if heads not in self.heads:
            self.heads.append(heads)
        return super().__call__(layer, query, key, value)

    def keep_state(self, layer: int, state: LayerState) -> None:
        self.states.setdefault(layer, []).append(state)


def find_mask(masks: Masks, kind: str) -> Tensor | None:
    return masks.get(kind, masks.get(ALL_LAYERS))
