"""Sampling with adapters folded into the weights they adapt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import Linear


@contextlib.contextmanager
def folded(model: Any) -> Iterator[None]:
    """Inside, every adapted float32 layer holds ``W + ΔW`` and skips its adapter.

    Decoding one token passes each adapter's two thin matrices for a handful of rows, which costs
    more than the wide product they stand beside. The original weights are put back by reference,
    so nothing drifts. Layers in a shorter format keep their adapters: there ``ΔW`` is far below
    the spacing of ``W`` and would be rounded away, and the sampler would not be the policy.
    """
    kept: list[tuple[Linear, torch.Tensor]] = []
    try:
        for layer in model.modules():
            if isinstance(layer, Linear) and layer.get_base_layer().weight.dtype == torch.float32:
                weight: torch.Tensor = layer.get_base_layer().weight  # type: ignore[assignment]
                kept.append((layer, weight.data))
                for name in layer.active_adapters:
                    weight.data = weight.data + layer.get_delta_weight(name)
                layer.merged_adapters.extend(layer.active_adapters)
        yield
    finally:
        for layer, original in kept:
            layer.get_base_layer().weight.data = original  # type: ignore[union-attr]
            layer.merged_adapters.clear()
