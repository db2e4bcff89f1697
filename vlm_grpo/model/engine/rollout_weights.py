"""Weights prepared once for all decode steps of a rollout.

On the CPU, oneDNN reorders them once instead of in each product, and layers that read the same
input are multiplied at once (``engine/cpu/joined.py``). On other devices weights are not copied, to
save memory, except to restore quantized ones or to merge float32 adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from vlm_grpo.model.engine.cpu.joined import can_reorder, join_products
from vlm_grpo.model.engine.kv_cache import count_free_bytes
from vlm_grpo.model.engine.linear import (
    cast_by_autocast,
    cast_factors,
    get_base,
    get_dtype,
    is_adapted,
    is_fast,
    is_quantized,
    merge,
    restore_weight,
)


@contextlib.contextmanager
def rollout_weights(model: nn.Module) -> Iterator[bool]:
    """Prepare the weights of linear layers for decoding; inside, nothing may be trained.

    An adapted float32 layer uses ``W + ΔW``; one in a lower precision keeps its adapter. Under
    autocast the weights are cast once. Quantized weights are restored once, on a GPU if their
    matrices take at most half of the free memory.

    Yields whether weights were copied, so that steps captured inside must not be replayed later.
    """
    # For a few rows, an adapter's two thin products cost more than the wide one. In a lower
    # precision, ΔW is far below the spacing of W and would be rounded away, so that the sampler
    # would differ from the policy.
    fast: list[Any] = [module for module in model.modules() if is_fast(module)]
    adapted = [layer for layer in fast if is_adapted(layer)]
    off = {layer for layer in adapted if layer.disable_adapters or layer.merged}
    bases = {layer.base_layer for layer in adapted if layer not in off}
    layers = [layer for layer in fast if layer not in bases and layer not in off]
    reordered = {layer for layer in layers if can_reorder(layer)}
    has_room = _has_room([base for layer in layers if is_quantized(base := get_base(layer))])
    try:
        join_products(model, reordered)
        others = [layer for layer in layers if layer not in reordered]
        are_copied = [_prepare(layer, has_room) for layer in others]
        yield bool(reordered) or any(are_copied)
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _prepare(layer: Any, has_room: bool) -> bool:
    """Replace the layer's forward for a rollout, and return whether its weights were copied."""
    base = get_base(layer)
    is_held, may_copy = is_quantized(base), has_room or not is_quantized(base)
    if is_adapted(layer) and not (get_dtype(base) == torch.float32 and may_copy):
        # Overwritten by each rollout, so that captured steps find them at the same address.
        factors = cast_factors(layer)
        kept = vars(layer).setdefault("rollout_factors", factors)
        for old, new in zip(kept, factors, strict=True):
            old.copy_(new)
        weight = restore_weight(base) if is_held and may_copy else None
        layer.forward = partial(_multiply_apart, base, weight, *kept)
        return weight is not None
    if not may_copy:
        return False
    weight = cast_by_autocast(merge(layer) if is_adapted(layer) else restore_weight(base))
    if weight.data_ptr() == base.weight.data_ptr():
        return False
    layer.forward = partial(_multiply, weight, base.bias)
    return True


def _multiply(
    weight: Float[Tensor, "outputs inputs"], bias: Tensor | None, x: Float[Tensor, "*rows inputs"]
) -> Float[Tensor, "*rows outputs"]:
    return linear(x.to(weight.dtype), weight, bias)


def _multiply_apart(
    base: Any, matrix: Tensor | None, first: Tensor, second: Tensor, *rest: Tensor
) -> Tensor:
    """Compute the output of an adapted layer with the adapter beside the weights.

    ``matrix`` is its quantized weights; None: they are restored each time. ``first`` and ``second``
    are A and ``s B``, before DoRA's factors, if any, and the inputs.
    """
    *norms, x = rest
    rows = x.flatten(0, -2)
    weight = restore_weight(base) if matrix is None else matrix
    output = linear(rows, weight, None if norms else base.bias)
    output = torch.addmm(output, linear(rows, first), second.T)
    if norms:
        output = output * norms[0] if base.bias is None else output * norms[0] + base.bias
    return output.view(*x.shape[:-1], -1)


def _has_room(quantized: Sequence[Any]) -> bool:
    """Return whether a GPU has room for the matrices of quantized layers during a rollout."""
    if not quantized or quantized[0].weight.device.type != "cuda":
        return True
    matrices = sum(
        layer.out_features * layer.in_features * get_dtype(layer).itemsize for layer in quantized
    )
    return 2 * matrices <= count_free_bytes(quantized[0].weight.device)
