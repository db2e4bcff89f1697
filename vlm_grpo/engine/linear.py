"""Faster linear layers with equal results: on CPUs, and under LoRA adapters.

On the CPU, PyTorch computes float32 matrix products with MKL, which is slow on processors other
than Intel's; oneDNN, which is also part of PyTorch, was 2.1 times as fast on an AMD EPYC
(``perf/README.md``). For the few rows of a decode step both libraries spend most of their time
reordering the weights, which a rollout can do once for all of its tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from peft.tuners import lora
from peft.tuners.lora.variants import DoraLinearVariant
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional

INITIAL_FACTORS = ("initial_A", "initial_B")
"""Buffers of an adapted layer with the values that its factors were initialized to, if their
product is subtracted (``model/adapters.py``)."""


def use_fast_linears(model: nn.Module) -> None:
    """Replace the forward of the model's linear layers and adapters with those of this module.

    Their weights and names do not change. Modules that are trained beside adapters keep theirs:
    their weights are rounded for each pass.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    rounded = {module for wrapper in wrappers for module in wrapper.modules_to_save.modules()}
    for module in model.modules():
        if type(module) is nn.Linear and module not in rounded:
            module.__class__ = Linear
        elif type(module) is lora.Linear and _is_supported(module):
            module.__class__ = AdaptedLinear


def _is_supported(layer: lora.Linear) -> bool:
    """Return whether the layer has one adapter, LoRA's or DoRA's, without dropout or bias."""
    dropouts = (getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values())
    others = [v for v in layer.lora_variant.values() if not isinstance(v, DoraLinearVariant)]
    changes = [*others, *filter(None, layer.lora_bias.values()), *filter(None, dropouts)]
    return len(layer.lora_A) == 1 and not changes


class Linear(nn.Linear):
    """``nn.Linear`` with faster matrix products.

    Attributes:
        rollout_weight: replaces ``weight`` inside ``rollout_weights``; None outside.
    """

    rollout_weight: Tensor | None = None

    def forward(self, input: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        if self.rollout_weight is not None:
            input = input.to(self.rollout_weight.dtype)
            return _prepared_product(input, self.rollout_weight, self.bias)
        if _uses_onednn(input, self.weight):
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
        rollout_factors: A, ``s Bᵀ`` and DoRA's factors (empty without DoRA) in W's dtype,
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
        return _base(self).weight + (b @ a) * scaling

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

    def prepare_rollout(self) -> None:
        """Cast the adapter's factors and, on the CPU, join W and A to save a product per token."""
        weight = _base(self).weight
        a, b, scaling = self._factors()
        scale = self._compute_dora_factors() if self.has_norms else b.new_ones(0)
        parts = a.detach(), b.detach().T * scaling, scale.detach()
        factors = [part.to(weight.dtype) for part in parts]
        if self.rollout_factors is None:
            self.rollout_factors = tuple(factors)
        else:
            for kept, new in zip(self.rollout_factors, factors, strict=True):
                kept.copy_(new)
        if _can_reorder(weight):
            self.rollout_weight = _prepare(torch.cat([weight, factors[0]]))
        self.is_in_rollout = True

    def _rollout_forward(self, x: Tensor) -> Tensor:
        assert self.rollout_factors is not None
        first, second, scale = self.rollout_factors
        base, rows = _base(self), x.flatten(0, -2)
        bias = None if self.has_norms else base.bias
        if self.rollout_weight is None:
            output = functional.linear(rows, base.weight, bias)
            inner = functional.linear(rows, first)
        else:
            both = _prepared_product(rows, self.rollout_weight, None)
            output, inner = both.split([second.shape[1], second.shape[0]], 1)
            output = output if bias is None else output + bias
        output = torch.addmm(output, inner, second)
        if self.has_norms:
            output = output * scale if base.bias is None else output * scale + base.bias
        return output.view(*x.shape[:-1], -1)


@contextlib.contextmanager
def rollout_weights(model: nn.Module) -> Iterator[bool]:
    """Prepare the weights of linear layers for decoding; inside, nothing may be trained.

    An adapted float32 layer uses ``W + ΔW`` and skips its adapter, whose two thin products cost
    more than the wide one for a few rows. A layer in a lower precision keeps its adapter: there
    ``ΔW`` is far below the spacing of ``W`` and would be rounded away, so the sampler would differ
    from the policy. Under autocast the weights are cast once. On the CPU all weights are
    reordered once; on other devices nothing else is copied, to save memory.

    Yields:
        Whether weights were copied, so that steps captured inside must not be replayed later.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    try:
        for layer in adapted:
            if _base(layer).weight.dtype == torch.float32:
                layer.merge_for_rollout()
            else:
                layer.prepare_rollout()
        bases = {_base(layer) for layer in adapted}
        for layer in layers:
            if layer not in bases:
                layer.rollout_weight = _prepare(layer.weight)
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
    """``input @ weight.T + bias`` and its gradients, computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        return _onednn(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad_outputs[0]
        rows = grad.flatten(0, -2)
        return (
            product(grad, weight.T) if needs_input else None,
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
        output = product(rows, weight, bias)
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
            d_x = product(grad, weight.T).addmm_(d_inner, a)
            d_x = d_x.view(*grad_outputs[0].shape[:-1], -1)
        return d_x, None, None, d_a, d_b, None


def outer(left: Float[Tensor, "n p"], right: Float[Tensor, "n q"]) -> Float[Tensor, "p q"]:
    """Compute ``left.T @ right`` in the faster order."""
    if left.shape[1] > right.shape[1]:
        return product(right.T, left.T).T
    return product(left.T, right.T)
