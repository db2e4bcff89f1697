"""Faster linear layers with equal results: on CPUs, and under LoRA adapters.

On the CPU, PyTorch computes float32 matrix products with MKL, which is slow on processors other
than Intel's; oneDNN, which is also part of PyTorch, was 2.1 times as fast on an AMD EPYC
(``perf/README.md``). For the few rows of a decode step both libraries spend most of their time
reordering the weights, which a rollout can do once for all of its tokens
(``engine/rollout_weights.py``).

Weights that bitsandbytes holds in 4 or 8 bits are restored for each product of the forward and the
backward pass, or once for a rollout, and multiplied like any others. A token's values then do not
depend on the tokens beside it. In bitsandbytes' own products they do: a single row in 4 bits has a
kernel of its own, and LLM.int8 (Dettmers et al., 2022, arXiv:2208.07339) chooses by all rows which
columns it computes in 8 bits, after rounding the rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

Product = Callable[[Tensor], Tensor]
"""A function from a layer's inputs (…, inputs) to its outputs (…, outputs)."""
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
        rollout_product: replaces the product inside ``rollout_weights`` on the CPU; None elsewhere.
        dense_dtype: precision of the matrix of quantized weights; None: they are not quantized.
    """

    rollout_weight: Tensor | None = None
    rollout_product: Product | None = None
    dense_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights in a product."""
        return self.dense_dtype or self.weight.dtype

    def restore(self) -> Tensor:
        """Return the weights as a matrix."""
        return restore(self.weight, self.dtype)

    def forward(self, input: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        if self.rollout_product is not None:
            return self.rollout_product(input)
        if self.rollout_weight is not None:
            input = input.to(self.rollout_weight.dtype)
            return functional.linear(input, self.rollout_weight, self.bias)
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
        rollout_product: replaces the product inside ``rollout_weights``; None outside.
        rollout_factors: A, ``s B`` and, with DoRA, its factors in W's dtype,
            overwritten by each ``rollout_weights``, so that captured steps find them at the same
            address; None before the first and on the CPU.
    """

    rollout_product: Product | None = None
    rollout_factors: tuple[Tensor, ...] | None = None

    def forward(
        self, x: Float[Tensor, "*rows inputs"], *args: Any, **kwargs: Any
    ) -> Float[Tensor, "*rows outputs"]:
        base: Any = self.base_layer
        if self.disable_adapters or self.merged:
            return base(x)
        if self.rollout_product is not None:
            return self.rollout_product(x)
        a, b, scaling = self._factors()
        bias = None if self.has_norms else base.bias
        output: Any = _AdaptedProduct.apply(x, base.weight, bias, a, b, scaling)
        if not self.has_norms:
            return output
        output = output * self._compute_dora_factors().to(output.dtype)
        return output if base.bias is None else output + base.bias

    @property
    def base(self) -> Linear:
        """The layer that is adapted."""
        return self.get_base_layer()  # type: ignore[return-value]

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
        return self.base.restore() + (b @ a) * scaling

    def _compute_dora_factors(self) -> Tensor:
        (name,) = self.active_adapters
        magnitude: Any = self.lora_magnitude_vector[name].weight
        return magnitude / self._join().norm(dim=1)

    @torch.no_grad()
    def merge(self) -> Tensor:
        """Return ``W + s B A`` in the adapter's dtype, with DoRA's factors."""
        weight = self._join()
        return weight * self._compute_dora_factors()[:, None] if self.has_norms else weight

    @torch.no_grad()
    def cast_factors(self) -> tuple[Tensor, ...]:
        """Return A, ``s B`` and, with DoRA, its factors, in W's dtype."""
        a, b, scaling = self._factors()
        parts = [a, b * scaling]
        if self.has_norms:
            parts.append(self._compute_dora_factors())
        return tuple(part.detach().to(self.base.dtype) for part in parts)

    def multiply_apart(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Compute the output in a rollout with the adapter beside the weights."""
        assert self.rollout_factors is not None
        first, second, *norms = self.rollout_factors
        base, rows = self.base, x.flatten(0, -2)
        weight = base.restore() if base.rollout_weight is None else base.rollout_weight
        output = functional.linear(rows, weight, None if norms else base.bias)
        output = torch.addmm(output, functional.linear(rows, first), second.T)
        if norms:
            output = output * norms[0] if base.bias is None else output * norms[0] + base.bias
        return output.view(*x.shape[:-1], -1)


def product(
    input: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "*rows outputs"]:
    """Compute ``input @ weight.T + bias`` without gradient."""
    if _uses_onednn(input, weight):
        return multiply_by_onednn(input, weight, bias)
    return functional.linear(input, weight, bias)


def has_onednn() -> bool:
    """Return whether PyTorch has oneDNN, and its switch ``torch.backends.mkldnn`` is on."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _uses_onednn(input: Tensor, weight: Tensor) -> bool:
    # PyTorch already computes bfloat16 products with oneDNN.
    return (
        has_onednn()
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )


def multiply_by_onednn(
    input: Float[Tensor, "*rows inputs"], weight: Tensor, bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*rows outputs"]:
    """Compute ``product`` by oneDNN, with weights (outputs, inputs) or reordered ones."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")  # noqa: SLF001


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
