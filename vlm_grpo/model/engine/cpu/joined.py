"""The products of a decode step: with reordered weights, and of several layers at once.

For the few rows of a decode step, starting a product takes about as long as computing a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vlm_grpo.model.engine import linear
from vlm_grpo.model.engine.cpu.onednn import has_onednn, multiply_by_onednn, reorder

_SIBLINGS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of layers of a module that usually read the same input."""


def can_reorder(layer: nn.Module) -> bool:
    """Return whether oneDNN has an order of its own for the layer's weights."""
    base = linear.get_base(layer)
    if base.weight.device.type != "cpu" or not has_onednn():
        return False
    dtype = linear.get_dtype(base)
    if dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"):
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
    return dtype != torch.float64


def join_products(model: nn.Module, layers: Collection[Any]) -> None:
    groups: list[list[Any]] = []
    for module in model.modules():
        for names in _SIBLINGS:
            found: list[Any] = [getattr(module, name, None) for name in names]
            found = [layer for layer in found if layer in layers]
            kinds = {(linear.get_dtype(linear.get_base(x)), x.in_features) for x in found}
            if len(kinds) == 1:
                groups.append(found)
    grouped = {layer for group in groups for layer in group}
    for group in [*groups, *([layer] for layer in layers if layer not in grouped)]:
        JoinedProduct(group)


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
        weight = linear.cast_by_autocast(_concatenate(weights))
        self.dtype = weight.dtype
        self.first: Tensor | None = None
        if any(factor is not None for factor in first):
            factors = [factor for factor in first if factor is not None]
            self.first = reorder(_concatenate(factors).to(self.dtype))
            blocks = self._fill(second, lambda size: torch.empty(size, 0))
            joined = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
            weight = torch.cat([weight, joined.to(self.dtype)], -1)
        self.weight = reorder(weight)
        self.norms = self._join(norms, torch.ones)
        self.bias = self._join(biases, torch.zeros)
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for number, layer in enumerate(layers):
            layer.forward = partial(self, number)

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
        output = multiply_by_onednn(x, self.weight, self.bias if self.norms is None else None)
        if self.norms is not None:
            output = output * self.norms if self.bias is None else output * self.norms + self.bias
        return [output] if len(self.sizes) == 1 else output.split(self.sizes, -1)

    def _fill(self, parts: Sequence[Tensor | None], build: Callable[[int], Tensor]) -> list[Tensor]:
        """Build the tensors that layers lack, given their number of outputs."""
        return [
            build(size) if part is None else part
            for part, size in zip(parts, self.sizes, strict=True)
        ]

    def _join(
        self, parts: Sequence[Tensor | None], build: Callable[[int], Tensor]
    ) -> Tensor | None:
        if all(part is None for part in parts):
            return None
        return _concatenate(self._fill(parts, build)).to(self.dtype)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _read(layer: Any) -> tuple[Tensor | None, ...]:
    """Return a layer's weights and bias, and the factors of an adapter that is not merged."""
    base = linear.get_base(layer)
    if not linear.is_adapted(layer):
        return linear.restore_weight(base), base.bias, None, None, None
    if linear.get_dtype(base) == torch.float32:
        return linear.merge(layer), base.bias, None, None, None
    first, second, *norms = linear.cast_factors(layer)
    return linear.restore_weight(base), base.bias, first, second, norms[0] if norms else None
