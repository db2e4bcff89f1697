"""Layers with a recurrent state, such as gated-delta and short-convolution layers.

Such a layer reads all earlier tokens of its row, so it cannot run over a packed row. It runs over
each prompt, and then over the prompt's completions as a batch that starts from the state at the
prompt's end. transformers keeps that state in a cache, which it overwrites in place; here it is
replaced, so that gradients flow from all completions to the prompt.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vlm_grpo.model.engine.forwards import replace_forward
from vlm_grpo.model.families.family import RECURRENT_TYPES

_CACHE_NAMES = ("cache_params", "past_key_values")
"""Names that transformers gives to a layer's cache."""

RecurrentLayer = Callable[[Tensor, "LayerState"], Tensor]
"""Maps rows (rows, T, width) and their state, which it updates, to the layer's output."""


class LayerState:
    """The state of one layer, with the methods of transformers' ``Cache`` that such layers call."""

    def __init__(self, tensors: dict[tuple[str, int], Tensor] | None = None) -> None:
        self.tensors = tensors or {}  # (rows, …), by kind and index; empty at the start of a row

    def fork(self, rows: int) -> LayerState:
        """Return the state of one row as that of several, without a copy."""
        expanded = {k: v.expand(rows, *v.shape[1:]) for k, v in self.tensors.items()}
        return LayerState(expanded)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.tensors.get(("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # a layer then never updates the state of its convolution in place

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
        kept = nn.functional.pad(kept, (size - kept.shape[-1], 0))
        self.tensors["conv", state_idx] = kept
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.tensors["recurrent", state_idx] = recurrent_states
        return recurrent_states


class CachedState(LayerState):
    """A state that is overwritten in place, token by token, without gradient."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self.tensors["recurrent", state_idx].copy_(recurrent_states)


def count_state(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a row's state in a recurrent layer, by the layer's configuration."""
    # The inputs of a convolution have the precision ``dtype``; a gated-delta state is in float32.
    kernel = getattr(config, "conv_L_cache", None)
    if kernel is not None:
        return config.hidden_size * kernel * dtype.itemsize
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    inputs = (2 * keys + heads * width) * config.linear_conv_kernel_dim
    return inputs * dtype.itemsize + heads * config.linear_key_head_dim * width * 4


def find_recurrent_layers(language_model: nn.Module) -> list[Any]:
    config: Any = language_model.config
    kinds = getattr(config, "layer_types", None) or ()
    return [
        module
        for module in language_model.modules()
        if (index := getattr(module, "layer_idx", None)) is not None
        and index < len(kinds)
        and kinds[index] in RECURRENT_TYPES
        and _find_cache_name(type(module)) is not None
    ]


def share_recurrent_layers(language_model: nn.Module) -> None:
    for module in find_recurrent_layers(language_model):
        replace_forward(module, _dispatch)


def _dispatch(
    layer: Any, original: Any, hidden_states: Tensor, attend: Any = None, **kwargs: Any
) -> Any:
    if attend is None:
        return original(layer, hidden_states, **kwargs)
    name = str(_find_cache_name(type(layer)))
    return attend.recur(
        layer.layer_idx, lambda rows, state: original(layer, rows, **{name: state}), hidden_states
    )


@functools.cache
def _find_cache_name(kind: type[nn.Module]) -> str | None:
    parameters = inspect.signature(kind.forward).parameters
    if "hidden_states" not in parameters or "position_embeddings" in parameters:
        return None
    return next((name for name in _CACHE_NAMES if name in parameters), None)
