"""Weights prepared once for all decode steps of a rollout.

Layers that read the same input are multiplied at once: for the few rows of a decode step, starting
a product takes about as long as computing a small one. On the CPU, oneDNN reorders the weights once
instead of in each product. On other devices weights are not copied, to save memory, except to
restore quantized ones or to merge float32 adapters; frozen ones move next to each other instead.
"""

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
def rollout_weights(model: nn.Module, may_move: bool = True) -> Iterator[bool]:
    """Prepare the weights of linear layers for decoding; inside, nothing may be trained.

    ``may_move``: frozen weights may have other addresses from now on.

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
            JoinedProduct(group, is_reordered=True, merges=True)
        others = [layer for layer in layers if layer not in reordered]
        movable = {layer for layer in others if may_move and _can_move(layer)}
        for group in _group_siblings(model, movable):
            if len(group) > 1 or is_adapted(group[0]):
                JoinedProduct(group, moves=True)
                others = [layer for layer in others if layer not in group]
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
        JoinedProduct([layer], linear.restore_weight(base) if may_copy else None)
        return is_held and may_copy
    if not may_copy:
        return False
    weight = _cast_by_autocast(_read_weight(layer))
    if weight.data_ptr() == base.weight.data_ptr():
        return False
    JoinedProduct([layer], weight, merges=True)
    return True


def _can_move(layer: Any) -> bool:
    """Return whether a larger tensor may hold the layer's weights: frozen, and only read."""
    base = get_base(layer)
    is_merged = is_adapted(layer) and get_dtype(base) == torch.float32
    is_cast = torch.is_autocast_enabled(base.weight.device.type)
    return not (base.weight.requires_grad or is_quantized(base) or is_merged or is_cast)


def _move_together(layers: Sequence[Any], factors: Tensor | None) -> Tensor:
    """Return the rows of all weights as one tensor, of which they are parts from now on, with the
    first factors of adapters as its last rows, in multiples of 8, which GPUs multiply faster."""
    weights, own = [get_base(layer).weight for layer in layers], vars(layers[0])
    count = 0 if factors is None else len(factors)
    sizes = [*map(len, weights), -(-count // 8) * 8]
    joined: Tensor = own.get("rollout_rows", weights[0].new_zeros(0))
    parts = joined.split(sizes) if len(joined) else ()
    if [part.data_ptr() for part in parts[:-1]] != [weight.data_ptr() for weight in weights]:
        spare = weights[0].new_zeros(sizes[-1], weights[0].shape[1])
        joined = own["rollout_rows"] = torch.cat([*(w.detach() for w in weights), spare])
        for weight, part in zip(weights, joined.split(sizes), strict=False):
            weight.data = part
    if factors is not None:
        joined[-sizes[-1] :][:count] = factors
    return joined


def _cast_by_autocast(weight: Tensor) -> Tensor:
    weight, kind = weight.detach(), weight.device.type
    return weight.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else weight


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

    With adapters ``ΔW = B A``, reordered weights are ``[W B]``, and the input is ``[x; A x]``: a
    thin product for ``A x`` and a wide one. Weights that may move are ``[W; A]``, whose product has
    ``A x`` beside ``W x``. Others are multiplied apart from the adapters.

    The first layer that is called computes the outputs of all, and the others take theirs. A model
    calls its layers one by one, and only the identity of the inputs tells that they are the same.
    If a layer gets another input before all have taken their outputs, the layers are multiplied one
    by one from then on.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        # rows of their weights; None: a copy, or for each product those of one layer
        weight: Tensor | None = None,
        is_reordered: bool = False,  # oneDNN multiplies the copy
        merges: bool = False,  # float32 weights include their adapters
        moves: bool = False,  # the layers' weights become parts of one tensor, for good
    ) -> None:
        self.layers, self.is_reordered, self.merges = layers, is_reordered, merges
        self.sizes = [get_base(layer).out_features for layer in layers]
        if is_reordered:
            weight = _cast_by_autocast(_concatenate([*map(_read_weight, layers)]))
        self.dtype = get_dtype(get_base(layers[0])) if weight is None else weight.dtype
        biases, first, second, norms = zip(*(_read(layer, merges) for layer in layers), strict=True)
        self.norms, self.bias = (
            None
            if all(part is None for part in parts)
            else _concatenate(self._fill(parts, build)).to(self.dtype)
            for parts, build in ((norms, torch.ones), (biases, torch.zeros))
        )
        self.first: Tensor | None = None
        self.second: Any = None
        factors = [factor for factor in first if factor is not None]
        if factors:
            self.first = _concatenate(factors).to(self.dtype)
            blocks = self._fill(second, lambda size, **options: torch.empty(size, 0, **options))
            joined = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
            self.second = joined.to(self.dtype)
        if is_reordered:
            assert weight is not None
            if self.first is not None:
                weight = torch.cat([weight, self.second], -1)
                self.first = linear.reorder(self.first)
            weight = linear.reorder(weight)
        else:
            if moves:
                weight = _move_together(layers, self.first)
                self.first = None
                if self.bias is not None and self.norms is None:
                    spare = len(weight) - sum(self.sizes)
                    self.bias = nn.functional.pad(self.bias, (0, spare))
            self._keep_addresses()
        self.weight: Any = weight
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for number, layer in enumerate(layers):
            layer.forward = partial(self, number)

    def _keep_addresses(self) -> None:
        """Overwrite the tensors of the last rollout, where captured steps read them."""
        parts = self.first, self.second, self.norms, self.bias
        known = vars(self.layers[0]).setdefault("rollout_factors", {})
        kept = known.setdefault(tuple(map(id, self.layers)), parts)
        for old, new in zip(kept, parts, strict=True):
            if old is not None:
                old.copy_(new)
        self.first, self.second, self.norms, self.bias = kept

    def _fill(self, parts: Sequence[Tensor | None], build: Callable[..., Tensor]) -> list[Tensor]:
        """Build the tensors that layers lack, given their number of outputs."""
        pairs, device = zip(parts, self.sizes, strict=True), get_base(self.layers[0]).weight.device
        return [build(size, device=device) if part is None else part for part, size in pairs]

    def __call__(
        self, number: int, x: Float[Tensor, "*rows inputs"]
    ) -> Float[Tensor, "*rows outputs"]:
        if self._input is not x or number not in self._outputs:
            if self._outputs:
                for layer in self.layers:
                    weight = None if self.is_reordered else get_base(layer).weight.detach()
                    JoinedProduct([layer], weight, self.is_reordered, self.merges)
                return self.layers[number].forward(x)
            self._input, self._outputs = x, dict(enumerate(self._multiply(x)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._input = None
        return output

    def _multiply(self, x: Tensor) -> Sequence[Tensor]:
        x, bias = x.to(self.dtype), self.bias if self.norms is None else None
        if self.is_reordered:
            if self.first is not None:
                x = torch.cat([x, multiply_by_onednn(x, self.first, None)], -1)
            output = multiply_by_onednn(x, self.weight, bias)
        else:
            base, rows = get_base(self.layers[0]), x.flatten(0, -2)
            weight = linear.restore_weight(base) if self.weight is None else self.weight
            output = nn.functional.linear(rows, weight, bias)
            if self.second is not None:
                count, rank = sum(self.sizes), self.second.shape[1]
                inner = output[:, count : count + rank]
                if self.first is not None:
                    inner = nn.functional.linear(rows, self.first)
                output = output[:, :count].addmm_(inner, self.second.T)
            output = output.view(*x.shape[:-1], -1)
        if self.norms is not None:
            output = output * self.norms if self.bias is None else output * self.norms + self.bias
        return [output] if len(self.sizes) == 1 else output.split(self.sizes, -1)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _read_weight(layer: Any) -> Tensor:
    base = get_base(layer)
    is_merged = is_adapted(layer) and get_dtype(base) == torch.float32
    return linear.merge(layer) if is_merged else linear.restore_weight(base)


def _read(layer: Any, merges: bool) -> tuple[Tensor | None, ...]:
    """Return a layer's bias, and the factors of an adapter that is not merged."""
    base = get_base(layer)
    if not is_adapted(layer) or (merges and get_dtype(base) == torch.float32):
        return base.bias, None, None, None
    return base.bias, *linear.cast_factors(layer)
