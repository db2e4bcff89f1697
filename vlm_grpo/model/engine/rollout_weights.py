"""Weights prepared once for all decode steps of a rollout.

On the CPU, oneDNN reorders them once instead of in each product, and layers that read the same
input are multiplied at once: for the few rows of a decode step, starting a product takes about as
long as computing a small one. On other devices weights are not copied, to save memory, except to
restore quantized ones or to merge float32 adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vlm_grpo.model.engine import linear
from vlm_grpo.model.engine.kv_cache import count_free_bytes
from vlm_grpo.model.engine.linear import (
    get_base,
    get_dtype,
    is_adapted,
    is_quantized,
    multiply_by_onednn,
)

_SIBLINGS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of layers of a module that usually read the same input."""


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
    fast: list[Any] = [module for module in model.modules() if linear.is_fast(module)]
    adapted = [layer for layer in fast if is_adapted(layer)]
    off = {layer for layer in adapted if layer.disable_adapters or layer.merged}
    bases = {layer.base_layer for layer in adapted if layer not in off}
    layers = [layer for layer in fast if layer not in bases and layer not in off]
    reordered = {layer for layer in layers if _can_reorder(get_base(layer))}
    has_room = _has_room([base for layer in layers if is_quantized(base := get_base(layer))])
    try:
        for group in _group_siblings(model, reordered):
            JoinedProduct(group)
        others = [layer for layer in layers if layer not in reordered]
        are_copied = [_prepare(layer, has_room) for layer in others]
        yield bool(reordered) or any(are_copied)
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _can_reorder(base: Any) -> bool:
    """Return whether oneDNN has an order of its own for the layer's weights."""
    if base.weight.device.type != "cpu" or not linear.has_onednn():
        return False
    dtype = get_dtype(base)
    if dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"):
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
    return dtype != torch.float64


def _has_room(quantized: Sequence[Any]) -> bool:
    """Return whether a GPU has room for the matrices of quantized layers during a rollout."""
    if not quantized or quantized[0].weight.device.type != "cuda":
        return True
    matrices = sum(
        layer.out_features * layer.in_features * get_dtype(layer).itemsize for layer in quantized
    )
    return 2 * matrices <= count_free_bytes(quantized[0].weight.device)


def _prepare(layer: Any, has_room: bool) -> bool:
    """Replace the layer's forward for a rollout, and return whether its weights were copied."""
    base = get_base(layer)
    is_held, may_copy = is_quantized(base), has_room or not is_quantized(base)
    if is_adapted(layer) and not (get_dtype(base) == torch.float32 and may_copy):
        # Overwritten by each rollout, so that captured steps find them at the same address.
        factors = linear.cast_factors(layer)
        kept = vars(layer).setdefault("rollout_factors", factors)
        for old, new in zip(kept, factors, strict=True):
            old.copy_(new)
        weight = linear.restore_weight(base) if is_held and may_copy else None
        layer.forward = partial(_multiply_apart, base, weight, *kept)
        return weight is not None
    if not may_copy:
        return False
    weight = linear.merge(layer) if is_adapted(layer) else linear.restore_weight(base)
    weight = _cast_by_autocast(weight)
    if weight.data_ptr() == base.weight.data_ptr():
        return False
    layer.forward = partial(_multiply, weight, base.bias)
    return True


def _cast_by_autocast(weight: Tensor) -> Tensor:
    weight, kind = weight.detach(), weight.device.type
    return weight.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else weight


def _multiply(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return nn.functional.linear(x.to(weight.dtype), weight, bias)


def _multiply_apart(
    base: Any, matrix: Tensor | None, first: Tensor, second: Tensor, *rest: Tensor
) -> Tensor:
    """Compute the output of an adapted layer with the adapter beside the weights.

    ``matrix`` is its quantized weights; None: they are restored each time. ``first`` and ``second``
    are A and ``s B``, before DoRA's factors, if any, and the inputs.
    """
    *norms, x = rest
    rows = x.flatten(0, -2)
    weight = linear.restore_weight(base) if matrix is None else matrix
    output = nn.functional.linear(rows, weight, None if norms else base.bias)
    output = torch.addmm(output, nn.functional.linear(rows, first), second.T)
    if norms:
        output = output * norms[0] if base.bias is None else output * norms[0] + base.bias
    return output.view(*x.shape[:-1], -1)


def _group_siblings(model: nn.Module, layers: Collection[Any]) -> Iterator[list[Any]]:
    grouped = set()
    for module in model.modules():
        for names in _SIBLINGS:
            found: list[Any] = [getattr(module, name, None) for name in names]
            found = [layer for layer in found if layer in layers]
            if len({(get_dtype(get_base(x)), x.in_features) for x in found}) == 1:
                grouped.update(found)
                yield found
    yield from ([layer] for layer in layers if layer not in grouped)


class JoinedProduct:
    """The products of several layers with the same input, computed as one, as their forwards.

    With adapters ``ΔW = B A``, it is ``[W B] [x; A x]``: a thin product for ``A x`` and a wide one.

    The first layer that is called computes the outputs of all, and the others take theirs. A model
    calls its layers one by one, and only the identity of the inputs tells that they are the same.
    If a layer gets another input before all have taken their outputs, the layers are multiplied one
    by one from then on.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        weights, biases, first, second, norms = zip(*map(_read, layers), strict=True)
        self.sizes = [len(weight) for weight in weights]
        weight = _cast_by_autocast(_concatenate(weights))
        self.dtype = weight.dtype
        self.first: Tensor | None = None
        if any(factor is not None for factor in first):
            factors = [factor for factor in first if factor is not None]
            self.first = linear.reorder(_concatenate(factors).to(self.dtype))
            blocks = self._fill(second, lambda size: torch.empty(size, 0))
            joined = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
            weight = torch.cat([weight, joined.to(self.dtype)], -1)
        self.weight = linear.reorder(weight)
        self.norms, self.bias = (
            None
            if all(part is None for part in parts)
            else _concatenate(self._fill(parts, build)).to(self.dtype)
            for parts, build in ((norms, torch.ones), (biases, torch.zeros))
        )
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for number, layer in enumerate(layers):
            layer.forward = partial(self, number)

    def _fill(self, parts: Sequence[Tensor | None], build: Callable[[int], Tensor]) -> list[Tensor]:
        """Build the tensors that layers lack, given their number of outputs."""
        pairs = zip(parts, self.sizes, strict=True)
        return [build(size) if part is None else part for part, size in pairs]

    def __call__(
        self, number: int, x: Float[Tensor, "*rows inputs"]
    ) -> Float[Tensor, "*rows outputs"]:
        if self._input is not x or number not in self._outputs:
            if self._outputs:
                for layer in self.layers:
                    JoinedProduct([layer])
                return self.layers[number].forward(x)
            self._input, self._outputs = x, dict(enumerate(self._multiply(x)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._input = None
        return output

    def _multiply(self, x: Tensor) -> Sequence[Tensor]:
        x = x.to(self.dtype)
        if self.first is not None:
            x = torch.cat([x, multiply_by_onednn(x, self.first, None)], -1)
        bias = self.bias if self.norms is None else None
        output = multiply_by_onednn(x, self.weight, bias)
        if self.norms is not None:
            output = output * self.norms if self.bias is None else output * self.norms + self.bias
        return [output] if len(self.sizes) == 1 else output.split(self.sizes, -1)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _read(layer: Any) -> tuple[Tensor | None, ...]:
    """Return a layer's weights and bias, and the factors of an adapter that is not merged."""
    base = get_base(layer)
    if not is_adapted(layer):
        return linear.restore_weight(base), base.bias, None, None, None
    if get_dtype(base) == torch.float32:
        return linear.merge(layer), base.bias, None, None, None
    first, second, *norms = linear.cast_factors(layer)
    return linear.restore_weight(base), base.bias, first, second, norms[0] if norms else None
