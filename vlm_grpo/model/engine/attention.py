"""Attention and recurrent layers in which the completions of a group share one prompt.

The language model runs unchanged. Its attention layers are dispatched, through transformers'
attention registry, to the object passed as ``attend``, which gets the layer and its queries, keys
and values (rows, heads, T, width) and returns (rows, T, heads, width): ``PrefillAttention`` stores
the keys and values of prompts, ``DecodeAttention`` lets each completion's newest token attend to
its prompt and to its previous tokens, ``PackedAttention`` scores rows ``[prompt | c1 | … | cG]``.
Without ``attend`` the layers use plain SDPA.

Layers with a recurrent state, such as gated-delta and short-convolution layers, are dispatched to
``attend.recur``. Such a layer reads all earlier tokens of its row, so it cannot run over a packed
row. It runs over each prompt, and then over the prompt's completions as a batch that starts from
the state at the prompt's end. transformers keeps that state in a cache, which it overwrites in
place; here it is replaced, so that gradients flow from all completions to the prompt.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.forwards import replace_forward
from vlm_grpo.model.engine.kernels import GroupSpan, Layer, VarlenPlan
from vlm_grpo.model.families.family import ALL_LAYERS, RECURRENT_TYPES, Family, Masks

ATTENTION_NAME = "shared_prefix"  # name of this attention in transformers' registry
SEGMENTS_NAME = "flash_segments"
"""The vision tower's attention: transformers passes segments whole only if "flash" is in it."""
RecurrentLayer = Callable[[Tensor, "LayerState"], Tensor]
"""Maps rows (rows, T, width) and their state, which it updates, to the layer's output."""


@contextlib.contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Use transformers' own attention inside."""
    language_model = model.get_decoder()
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
    tensors = (query, key, value, cu_seq_lens_q)
    return kernels.attend_in_segments(*tensors, max_length_q, scaling), None


AttentionInterface.register(ATTENTION_NAME, _dispatch)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
AttentionInterface.register(SEGMENTS_NAME, _dispatch_segments)


def use_shared_attention(family: Family, model: Any) -> None:
    """Dispatch a model's attention, and its recurrent layers, through this module.

    The vision tower's images, or windows of images, are computed together.
    """
    language_model = model.get_decoder()
    language_model.config._attn_implementation = ATTENTION_NAME  # noqa: SLF001
    for layer in find_recurrent_layers(language_model):
        replace_forward(layer, _dispatch_recurrent)
    for layer in family.vision_layers(model):
        # A copy: transformers builds no model from a configuration that names an unknown kernel.
        layer.config = copy.copy(layer.config)
        layer.config._attn_implementation = SEGMENTS_NAME  # noqa: SLF001


def find_recurrent_layers(language_model: nn.Module) -> list[Any]:
    config: Any = language_model.config
    kinds = dict(enumerate(getattr(config, "layer_types", None) or ()))
    return [
        module
        for module in language_model.modules()
        if kinds.get(getattr(module, "layer_idx", -1)) in RECURRENT_TYPES
        and _find_cache_name(type(module)) is not None
    ]


@functools.cache
def _find_cache_name(kind: type[nn.Module]) -> str | None:
    parameters = inspect.signature(kind.forward).parameters
    if "hidden_states" not in parameters or "position_embeddings" in parameters:
        return None
    return next((n for n in ("cache_params", "past_key_values") if n in parameters), None)


def _dispatch_recurrent(
    layer: Any, original: Any, hidden_states: Tensor, attend: Any = None, **kwargs: Any
) -> Any:
    if attend is None:
        return original(layer, hidden_states, **kwargs)
    name = str(_find_cache_name(type(layer)))
    return attend.recur(
        layer.layer_idx, lambda rows, state: original(layer, rows, **{name: state}), hidden_states
    )


class LayerState:
    """The state of a recurrent layer, with the methods of transformers' ``Cache`` that it calls.

    ``in_place``: the tensors are overwritten, token by token, without gradient.
    """

    def __init__(
        self, tensors: dict[tuple[str, int], Tensor] | None = None, in_place: bool = False
    ) -> None:
        self.tensors = tensors or {}  # (rows, …), by kind and index; empty at the start of a row
        self.in_place = in_place

    def fork(self, rows: int) -> LayerState:
        """Return the state of one row as that of several, without a copy."""
        return LayerState({k: v.expand(rows, *v.shape[1:]) for k, v in self.tensors.items()})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return not self.in_place  # a layer then never updates the state of its convolution in place

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Append inputs of a convolution (rows, channels, T), and return them with earlier ones."""
        earlier = self.get_conv_state(layer_idx, state_idx)
        inputs = conv_states if earlier is None else torch.cat([earlier, conv_states], dim=-1)
        size = conv_kernel_size or conv_states.shape[-1]
        kept = inputs[..., -size:]
        self.tensors["conv", state_idx] = nn.functional.pad(kept, (size - kept.shape[-1], 0))
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        key = "recurrent", state_idx
        if self.in_place:
            return self.tensors[key].copy_(recurrent_states)
        self.tensors[key] = recurrent_states
        return recurrent_states


def find_mask(masks: Masks, kind: str) -> Tensor | None:
    return masks.get(kind, masks.get(ALL_LAYERS))


@dataclass(eq=False)
class PackedAttention:
    """Attention over one row of groups, each ``[prompt | c1 | … | cG]``, that the spans cover. A
    branch also sees its trunk, one of the completions before it, as if it belonged to the prompt.

    ``masks`` has each group's masks of layers in which its prompt is not causal (``PromptLayout``);
    ``path_masks`` those of each of its completions, (n, T + n) over the prompt and its own tokens.
    """

    spans: Sequence[GroupSpan]
    masks: Sequence[Masks] = ()
    path_masks: Sequence[Sequence[Masks]] = ()
    keeps_states: ClassVar[bool] = False  # of recurrent layers at the end of each completion

    def __post_init__(self) -> None:
        self.states: dict[int, list[LayerState]] = {}  # by layer, at the end of prompts or paths
        self.masks = self.masks or [{}] * len(self.spans)
        lengths = [span.completion_lengths for span in self.spans]
        self.path_masks = self.path_masks or [[{}] * len(own) for own in lengths]
        self._plan: VarlenPlan | None = None
        self._lengths = [
            n
            for span in self.spans
            for n in (span.prompt_length, *(sum(lengths) for _, lengths in span.levels))
        ]

    def __call__(
        self,
        layer: Layer,
        query: Float[Tensor, "1 heads T width"],
        key: Float[Tensor, "1 key_heads T width"],
        value: Float[Tensor, "1 key_heads T width"],
    ) -> Float[Tensor, "1 T heads width"]:
        masks = [find_mask(masks, layer.kind) for masks in self.masks]
        path_masks = [[find_mask(own, layer.kind) for own in group] for group in self.path_masks]
        row: Tensor | None = None
        if kernels.has_varlen(query) and layer.cap is None:
            self._plan = self._plan or VarlenPlan(self.spans, query.device)
            row = self._plan.attend(layer, query, key, value)
            if all(mask is None for mask in (*masks, *itertools.chain(*path_masks))):
                return row
            row = row.transpose(1, 2)
        # Split, not sliced: the gradient of a slice has the size of the entire row.
        tensors = (query, key, value) if row is None else (query, key, value, row)
        parts = zip(*(x.split(self._lengths, dim=2) for x in tensors), strict=True)
        outputs = []
        for span, mask, own_masks in zip(self.spans, masks, path_masks, strict=True):
            prompt = next(parts)
            if row is None or mask is not None:
                outputs.append(kernels.attend_prompt(layer, prompt[:3], mask))
            else:
                outputs.append(prompt[3])
            trunks: list[tuple[Tensor, ...]] = []
            left = iter(own_masks)
            for parent, lengths in span.levels:
                completions, before = next(parts), prompt
                if parent >= 0:
                    pairs = zip(prompt[:3], trunks[parent], strict=False)
                    before = tuple(torch.cat(pair, dim=2) for pair in pairs)
                own_masks = list(itertools.islice(left, len(lengths)))
                pieces = [(completions, lengths, None)]
                if span.parents or any(mask is not None for mask in own_masks):
                    own = list(zip(*(x.split(lengths, dim=2) for x in completions), strict=True))
                    trunks += own
                    if any(mask is not None for mask in own_masks):  # images that see themselves
                        every = zip(own, lengths, own_masks, strict=True)
                        pieces = [(x, (n,), m) for x, n, m in every]
                for own, lengths, mask in pieces:
                    if mask is not None:
                        pairs = zip(before[1:3], own[1:3], strict=True)
                        keys, values = (torch.cat(pair, dim=2) for pair in pairs)
                        outputs.append(kernels.attend(layer, own[0], keys, values, mask))
                    elif row is not None:
                        outputs.append(own[3])
                    elif own[0].shape[2]:
                        outputs.append(kernels.attend_completions(layer, before, own, lengths))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def recur(self, layer: int, run: RecurrentLayer, hidden: Tensor) -> Tensor:
        """Run a recurrent layer over each prompt, and from its state over the completions."""
        parts = iter(hidden.split(self._lengths, dim=1))
        outputs = []
        for span in self.spans:
            states = [LayerState()]  # of the prompt, then of the trunks
            outputs.append(run(next(parts), states[0]))
            for parent, lengths in span.levels:
                every = list(next(parts)[0].split(lengths))
                # One by one where the state at the end, which padding would change, is read.
                count = max(span.parents, default=-1) + 1 if parent < 0 else 0
                count = len(every) if self.keeps_states else count
                for own in [*([row] for row in every[:count]), every[count:]]:
                    if not own:
                        continue
                    state = states[parent + 1].fork(len(own))
                    states += [state] * (parent < 0)
                    rows = pad_sequence(own, batch_first=True)
                    # Kernels for single tokens have no gradient.
                    if rows.shape[1] == 1 and not self.keeps_states:
                        rows = nn.functional.pad(rows, (0, 0, 0, 1))
                    if rows.shape[1]:
                        rows = run(rows, state)
                        kept = [row[: len(x)] for row, x in zip(rows, own, strict=True)]
                        outputs.append(torch.cat(kept)[None])
            if self.keeps_states:
                self.states.setdefault(layer, []).extend(states[1:] or states)
        return torch.cat(outputs, dim=1)


class PrefillAttention(PackedAttention):
    """Attention over a row of prompts, which stores their keys, values and recurrent states."""

    keeps_states = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of each attention layer: (1, key heads, T, head width)."""
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
