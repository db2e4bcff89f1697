"""Faster linear layers with equal results: on CPUs, and under LoRA adapters.

On the CPU, PyTorch computes float32 matrix products with MKL, which is slow on processors other
than Intel's; oneDNN, which is also part of PyTorch, was 2.1 times as fast on an AMD EPYC
(``perf/README.md``). For the few rows of a decode step both libraries spend most of their time
reordering the weights, which a rollout can do once for all of its tokens.

Weights that bitsandbytes holds in 4 or 8 bits are restored for each product of the forward and the
backward pass, or once for a rollout, and multiplied like any others. A token's values then do not
depend on the tokens beside it. In bitsandbytes' own products they do: a single row in 4 bits has a
kernel of its own, and LLM.int8 (Dettmers et al., 2022, arXiv:2208.07339) chooses by all rows which
columns it computes in 8 bits, after rounding the rows too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from peft.tuners import lora
from peft.tuners.lora.variants import DoraLinearVariant
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional

from vlm_grpo.engine.kv_cache import count_free_bytes

INITIAL_FACTORS = ("initial_A", "initial_B")
"""Buffers of an adapted layer with the values that its factors were initialized to, if their
product is subtracted (``model/adapters.py``)."""
_ADAPTED = ("Linear", "Linear4bit", "Linear8bitLt")
"""Names of PEFT's adapted linear layers; to look up the last two would import bitsandbytes."""


def use_fast_linears(model: nn.Module) -> None:
    """Replace the forward of the model's linear layers and adapters with those of this module.

    Their weights and names do not change. Modules that are trained beside adapters keep theirs:
    their weights are rounded for each pass.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    rounded = {module for wrapper in wrappers for module in wrapper.modules_to_save.modules()}
    modules: Iterable[Any] = model.modules()
    for module in modules:
        kind = type(module)
        if kind is nn.Linear and module not in rounded:
            module.__class__ = Linear
        elif kind.__name__ in _ADAPTED and _is_supported(module):
            module.__class__ = AdaptedLinear
        elif is_quantized(module) and kind is not Linear:
            module.__class__ = Linear
            module.dense_dtype = model.dtype


def _is_supported(layer: Any) -> bool:
    """Return whether the layer has one adapter, LoRA's or DoRA's, without dropout or bias."""
    if not isinstance(layer, lora.LoraLayer):
        return False
    dropouts = (getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values())
    others = [v for v in layer.lora_variant.values() if not isinstance(v, DoraLinearVariant)]
    changes = [*others, *filter(None, layer.lora_bias.values()), *filter(None, dropouts)]
    return len(layer.lora_A) == 1 and not changes


def is_quantized(module: nn.Module) -> bool:
    """Return whether it is a linear layer whose weights bitsandbytes holds in 4 or 8 bits."""
    names = ("Params4bit", "Int8Params")
    return isinstance(module, nn.Linear) and type(module.weight).__name__ in names


def restore(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix that quantized weights stand for; other weights as they are."""
    held: Any = weight
    if type(weight).__name__ == "Params4bit":
        state, shape = copy(held.quant_state), held.quant_state.shape
        # bitsandbytes 0.50.2 takes wrong scales for rows of, say, 1.5 blocks on CPUs with AVX-512.
        if shape.numel() % state.blocksize == 0:
            state.shape = torch.Size((shape.numel() // state.blocksize, state.blocksize))
        library: Any = import_module("bitsandbytes.functional")  # an extra
        return library.dequantize_4bit(held.data, state).view(shape).to(dtype)
    if type(weight).__name__ == "Int8Params":  # each row is a multiple of its largest value / 127
        scales = (held.SCB.to(weight.device) / 127)[:, None]
        return torch.mul(held.data, scales, out=torch.empty_like(held.data, dtype=dtype))
    return weight


class Linear(nn.Linear):
    """``nn.Linear`` with faster matrix products, also over quantized weights.

    Attributes:
        rollout_weight: replaces ``weight`` inside ``rollout_weights``; None outside.
        dense_dtype: precision of the matrix of quantized weights; None: they are not quantized.
    """

    rollout_weight: Tensor | None = None
    dense_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights in a product."""
        return self.dense_dtype or self.weight.dtype

    def restore(self) -> Tensor:
        """Return the weights as a matrix."""
        return restore(self.weight, self.dtype)

    def forward(self, input: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        if self.rollout_weight is not None:
            input = input.to(self.rollout_weight.dtype)
            return _prepared_product(input, self.rollout_weight, self.bias)
        if self.dense_dtype is not None or _uses_onednn(input, self.weight):
            return _Product.apply(input, self.weight, self.bias)  # type: ignore[return-value]
        return functional.linear(input, self.weight, self.bias)


class AdaptedLinear(lora.Linear):
    """PEFT's adapted layer, with the adapter's product added in place.

    ``y = x Wᵀ + b + s (x Aᵀ) Bᵀ`` (LoRA: Hu et al., 2021, arXiv:2106.09685, equation 3), computed
    in the dtype of x, which is W's. An adapter that was initialized from W has ``[A; A₀]`` and
    ``[B, −B₀]`` in place of A and B. DoRA multiplies each output by ``m / ‖W + s B A‖``, with the
    norm of its row, which has no gradient (Liu et al., 2024, arXiv:2402.09353, section 4.3).

    Attributes:
        rollout_weight: ``[W; A]`` inside ``rollout_weights`` where it is worth a copy of W; None
            elsewhere.
        rollout_factors: A, ``s Bᵀ`` and, with DoRA, its factors in W's dtype,
            overwritten by each ``rollout_weights``, so that captured steps find them at the same
            address; None before the first.
    """

    rollout_weight: Tensor | None = None
    rollout_factors: tuple[Tensor, ...] | None = None
    is_in_rollout = False

    def forward(
        self, x: Float[Tensor, "*rows inputs"], *args: Any, **kwargs: Any
    ) -> Float[Tensor, "*rows outputs"]:
        base: Any = self.base_layer
        if self.disable_adapters or self.merged:
            return base(x)
        if self.is_in_rollout:
            return self._rollout_forward(x)
        a, b, scaling = self._factors()
        bias = None if self.has_norms else base.bias
        output: Any = _AdaptedProduct.apply(x, base.weight, bias, a, b, scaling)
        if not self.has_norms:
            return output
        output = output * self._compute_dora_factors().to(output.dtype)
        return output if base.bias is None else output + base.bias

    @property
    def has_norms(self) -> bool:
        """Whether the adapter is DoRA's."""
        return bool(self.lora_magnitude_vector)

    def _factors(self) -> tuple[Any, Any, float]:
        """Return A, B and s."""
        (name,) = self.active_adapters
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        if hasattr(self, INITIAL_FACTORS[0]):
            a = torch.cat([a, self.initial_A])  # type: ignore[list-item]
            b = torch.cat([b, -self.initial_B], 1)  # type: ignore[operator]
        return a, b, self.scaling[name]

    @torch.no_grad()
    def _join(self) -> Tensor:
        """Return ``W + s B A``, in the adapter's dtype."""
        a, b, scaling = self._factors()
        return _base(self).restore() + (b @ a) * scaling

    def _compute_dora_factors(self) -> Tensor:
        (name,) = self.active_adapters
        magnitude: Any = self.lora_magnitude_vector[name].weight
        return magnitude / self._join().norm(dim=1)

    def merge_for_rollout(self) -> None:
        """Give the base layer the weights ``W + s B A``, with DoRA's factors."""
        weight = self._join()
        if self.has_norms:
            weight *= self._compute_dora_factors()[:, None]
        _base(self).rollout_weight = _prepare(weight)
        self.merged_adapters.extend(self.active_adapters)

    def prepare_rollout(self, has_room: bool = True) -> None:
        """Cast the adapter's factors and, on the CPU, join W and A to save a product per token;
        elsewhere restore W if it is quantized and there is room for it."""
        base = _base(self)
        a, b, scaling = self._factors()
        parts = [a.detach(), b.detach().T * scaling]
        if self.has_norms:
            parts.append(self._compute_dora_factors().detach())
        factors = [part.to(base.dtype) for part in parts]
        if self.rollout_factors is None:
            self.rollout_factors = tuple(factors)
        else:
            for kept, new in zip(self.rollout_factors, factors, strict=True):
                kept.copy_(new)
        if _can_reorder(base.weight):
            self.rollout_weight = _prepare(torch.cat([base.restore(), factors[0]]))
        elif has_room and base.dense_dtype is not None:
            base.rollout_weight = base.restore()
        self.is_in_rollout = True

    def _rollout_forward(self, x: Tensor) -> Tensor:
        assert self.rollout_factors is not None
        first, second, *norms = self.rollout_factors
        base, rows = _base(self), x.flatten(0, -2)
        bias = None if self.has_norms else base.bias
        if self.rollout_weight is None:
            weight = base.restore() if base.rollout_weight is None else base.rollout_weight
            output = functional.linear(rows, weight, bias)
            inner = functional.linear(rows, first)
        else:
            both = _prepared_product(rows, self.rollout_weight, None)
            output, inner = both.split([second.shape[1], second.shape[0]], 1)
            output = output if bias is None else output + bias
        output = torch.addmm(output, inner, second)
        if self.has_norms:
            output = output * norms[0] if base.bias is None else output * norms[0] + base.bias
        return output.view(*x.shape[:-1], -1)


@contextlib.contextmanager
def rollout_weights(model: nn.Module) -> Iterator[bool]:
    """Prepare the weights of linear layers for decoding; inside, nothing may be trained.

    An adapted float32 layer uses ``W + ΔW`` and skips its adapter, whose two thin products cost
    more than the wide one for a few rows. A layer in a lower precision keeps its adapter: there
    ``ΔW`` is far below the spacing of ``W`` and would be rounded away, so the sampler would differ
    from the policy. Under autocast the weights are cast once. On the CPU all weights are
    reordered once; on other devices nothing else is copied, to save memory, but quantized weights,
    which are restored once if their matrices take at most half of the free memory.

    Yields:
        Whether weights were copied, so that steps captured inside must not be replayed later.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    has_room = _has_room([layer for layer in layers if layer.dense_dtype is not None])
    try:
        for layer in adapted:
            base = _base(layer)
            if base.dtype == torch.float32 and (has_room or base.dense_dtype is None):
                layer.merge_for_rollout()
            else:
                layer.prepare_rollout(has_room)
        bases = {_base(layer) for layer in adapted}
        for layer in layers:
            if layer not in bases and (has_room or layer.dense_dtype is None):
                layer.rollout_weight = _prepare(layer.restore())
        pairs = [(layer.rollout_weight, layer.weight) for layer in layers]
        pairs += [(layer.rollout_weight, _base(layer).weight) for layer in adapted]
        yield any(
            new is not None and (new.is_mkldnn or new.data_ptr() != old.data_ptr())
            for new, old in pairs
        )
    finally:
        for layer in adapted:
            layer.rollout_weight, layer.is_in_rollout = None, False
            layer.merged_adapters.clear()
        for layer in layers:
            layer.rollout_weight = None


def _base(layer: AdaptedLinear) -> Linear:
    return layer.get_base_layer()  # type: ignore[return-value]


def _has_room(quantized: Sequence[Linear]) -> bool:
    """Return whether a GPU has room for the matrices of quantized layers during a rollout."""
    if not quantized or quantized[0].weight.device.type != "cuda":
        return True
    matrices = sum(
        layer.out_features * layer.in_features * layer.dtype.itemsize for layer in quantized
    )
    return 2 * matrices <= count_free_bytes(quantized[0].weight.device)


def product(
    input: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "*rows outputs"]:
    """Compute ``input @ weight.T + bias`` without gradient."""
    if _uses_onednn(input, weight):
        return _onednn(input, weight, bias)
    return functional.linear(input, weight, bias)


def _has_onednn() -> bool:
    """Return whether PyTorch has oneDNN, and its switch ``torch.backends.mkldnn`` is on."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _uses_onednn(input: Tensor, weight: Tensor) -> bool:
    # PyTorch already computes bfloat16 products with oneDNN.
    return (
        _has_onednn()
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")  # noqa: SLF001


def _prepare(weight: Tensor) -> Tensor:
    """Cast the weights as autocast would, and reorder them into oneDNN's layout if possible."""
    weight = weight.detach()  # assigning a parameter to a module would register it
    if torch.is_autocast_enabled(weight.device.type):
        weight = weight.to(torch.get_autocast_dtype(weight.device.type))
    if not _can_reorder(weight):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001


def _can_reorder(weight: Tensor) -> bool:
    """Return whether oneDNN has a layout for these weights."""
    return _has_onednn() and weight.device.type == "cpu" and weight.dtype != torch.float64


def _prepared_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with weights from ``_prepare``."""
    if weight.is_mkldnn:
        bias = None if bias is None else bias.to(input.dtype)
        return _onednn(input, weight, bias)
    return functional.linear(input, weight, bias)


class _Product(torch.autograd.Function):
    """``input @ weight.T + bias`` and its gradients, computed by oneDNN where it can."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        return product(input, restore(weight, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad_outputs[0]
        rows = grad.flatten(0, -2)
        return (
            product(grad, restore(weight, grad.dtype).T) if needs_input else None,
            outer(rows, input.flatten(0, -2)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class _AdaptedProduct(torch.autograd.Function):
    """The output of a frozen layer and its adapter, with gradients of the input and the adapter."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        rows, a, b = x.flatten(0, -2), a.to(x.dtype), b.to(x.dtype)
        inner = product(rows, a)
        output = product(rows, restore(weight, x.dtype), bias)
        output.addmm_(inner, b.T, alpha=scaling)
        ctx.save_for_backward(rows, weight, a, b, inner)
        ctx.scaling = scaling
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, a, b, inner = ctx.saved_tensors
        grad = grad_outputs[0].flatten(0, -2)
        d_inner = product(grad, b.T).mul_(ctx.scaling)
        d_a, d_b = outer(d_inner, rows), outer(grad, inner).mul_(ctx.scaling)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = product(grad, restore(weight, grad.dtype).T).addmm_(d_inner, a)
            d_x = d_x.view(*grad_outputs[0].shape[:-1], -1)
        return d_x, None, None, d_a, d_b, None


def outer(left: Float[Tensor, "n p"], right: Float[Tensor, "n q"]) -> Float[Tensor, "p q"]:
    """Compute ``left.T @ right`` in the faster order."""
    if left.shape[1] > right.shape[1]:
        return product(right.T, left.T).T
    return product(left.T, right.T)
