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
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vlm_grpo.model.engine.kv_cache import count_free_bytes
from vlm_grpo.model.engine.linear import AdaptedLinear, Linear, has_onednn, multiply_by_onednn

_SIBLINGS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of layers of a module that usually read the same input."""


@contextlib.contextmanager
def rollout_weights(model: nn.Module) -> Iterator[bool]:
    """Prepare the weights of linear layers for decoding; inside, nothing may be trained.

    An adapted float32 layer uses ``W + ΔW`` and skips its adapter, whose two thin products cost
    more than the wide one for a few rows. A layer in a lower precision keeps its adapter: there
    ``ΔW`` is far below the spacing of ``W`` and would be rounded away, so the sampler would differ
    from the policy. Under autocast the weights are cast once. Quantized weights are restored once,
    on a GPU if their matrices take at most half of the free memory.

    Yields:
        Whether weights were copied, so that steps captured inside must not be replayed later.
    """
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    bases = {layer.base for layer in adapted}
    plain = [m for m in model.modules() if isinstance(m, Linear) and m not in bases]
    every = [*plain, *bases]
    has_room = _has_room([layer for layer in every if layer.dense_dtype is not None])
    try:
        reordered = {layer for layer in (*plain, *adapted) if _can_reorder(layer)}
        for group in _find_groups(model, reordered):
            JoinedProduct(group)
        for layer in adapted:
            if layer not in reordered:
                _prepare_adapted(layer, has_room or layer.base.dense_dtype is None)
        for layer in plain:
            if layer not in reordered and (has_room or layer.dense_dtype is None):
                layer.rollout_weight = _cast(layer.restore())
        copies = [(layer.rollout_weight, layer.weight) for layer in every]
        yield bool(reordered) or any(
            new is not None and new.data_ptr() != old.data_ptr() for new, old in copies
        )
    finally:
        for layer in adapted:
            layer.rollout_product = None
        for layer in every:
            layer.rollout_product = layer.rollout_weight = None


class _Parts(NamedTuple):
    """The tensors that compute a layer's outputs; only an unmerged adapter has factors."""

    weight: Float[Tensor, "outputs inputs"]
    bias: Float[Tensor, " outputs"] | None
    first: Float[Tensor, "rank inputs"] | None = None
    second: Float[Tensor, "outputs rank"] | None = None
    norms: Float[Tensor, " outputs"] | None = None


class JoinedProduct:
    """The products of several layers with the same input, computed as one.

    With adapters ``ΔW = B A``, it is ``[W B] [x; A x]``: a thin product for ``A x`` and a wide one.

    The first layer that is called computes the outputs of all, and the others take theirs. If a
    layer gets another input before all have taken their outputs, the layers are multiplied one by
    one from then on.

    Args:
        layers: the layers, which it makes use this product.
    """

    def __init__(self, layers: Sequence[Linear | AdaptedLinear]) -> None:
        self.layers = layers
        weights, biases, first, second, norms = zip(*map(_read, layers), strict=True)
        self.sizes = [len(weight) for weight in weights]
        weight = _cast(_concatenate(weights))
        self.dtype = weight.dtype
        self.first: Tensor | None = None
        if any(factor is not None for factor in first):
            factors = [factor for factor in first if factor is not None]
            self.first = _reorder(_concatenate(factors).to(self.dtype))
            blocks = self._fill(second, lambda size: torch.empty(size, 0))
            joined = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
            weight = torch.cat([weight, joined.to(self.dtype)], -1)
        self.weight = _reorder(weight)
        self.norms = self._join(norms, torch.ones)
        self.bias = self._join(biases, torch.zeros)
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for number, layer in enumerate(layers):
            layer.rollout_product = partial(self, number)

    def __call__(
        self, number: int, x: Float[Tensor, "*rows inputs"]
    ) -> Float[Tensor, "*rows outputs"]:
        """Return the outputs of one of the layers."""
        if self._input is not x or number not in self._outputs:
            if self._outputs:
                for layer in self.layers:
                    JoinedProduct([layer])
                product: Any = self.layers[number].rollout_product
                return product(x)
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


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts as one tensor, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _get_base(layer: Linear | AdaptedLinear) -> Linear:
    return layer.base if isinstance(layer, AdaptedLinear) else layer


def _read(layer: Linear | AdaptedLinear) -> _Parts:
    base = _get_base(layer)
    if not isinstance(layer, AdaptedLinear):
        return _Parts(base.restore(), base.bias)
    if base.dtype == torch.float32:
        return _Parts(layer.merge(), base.bias)
    return _Parts(base.restore(), base.bias, *layer.cast_factors())


def _find_groups(model: nn.Module, layers: Collection[Any]) -> list[list[Linear | AdaptedLinear]]:
    """Return the layers, those together that are likely to read the same input."""
    groups: list[list[Any]] = []
    for module in model.modules():
        for names in _SIBLINGS:
            found: list[Any] = [getattr(module, name, None) for name in names]
            found = [layer for layer in found if layer in layers]
            if len({(_get_base(layer).dtype, layer.in_features) for layer in found}) == 1:
                groups.append(found)
    grouped = {layer for group in groups for layer in group}
    return groups + [[layer] for layer in layers if layer not in grouped]


def _prepare_adapted(layer: AdaptedLinear, may_copy: bool) -> None:
    """Merge the adapter, or update its factors in place."""
    if layer.base.dtype == torch.float32 and may_copy:
        layer.base.rollout_weight = _cast(layer.merge())
        layer.rollout_product = layer.base.forward
        return
    if layer.rollout_factors is None:
        layer.rollout_factors = layer.cast_factors()
    else:
        for kept, new in zip(layer.rollout_factors, layer.cast_factors(), strict=True):
            kept.copy_(new)
    if may_copy and layer.base.dense_dtype is not None:
        layer.base.rollout_weight = layer.base.restore()
    layer.rollout_product = layer.multiply_apart


def _cast(weight: Tensor) -> Tensor:
    """Return the weights as autocast would cast them, without gradient."""
    weight = weight.detach()  # assigning a parameter to a module would register it
    if torch.is_autocast_enabled(weight.device.type):
        weight = weight.to(torch.get_autocast_dtype(weight.device.type))
    return weight


def _can_reorder(layer: Linear | AdaptedLinear) -> bool:
    """Return whether oneDNN has a layout for the weights."""
    base = _get_base(layer)
    return has_onednn() and base.weight.device.type == "cpu" and base.dtype != torch.float64


def _has_room(quantized: Sequence[Linear]) -> bool:
    """Return whether a GPU has room for the matrices of quantized layers during a rollout."""
    if not quantized or quantized[0].weight.device.type != "cuda":
        return True
    matrices = sum(
        layer.out_features * layer.in_features * layer.dtype.itemsize for layer in quantized
    )
    return 2 * matrices <= count_free_bytes(quantized[0].weight.device)
