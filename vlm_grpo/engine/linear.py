"""Linear layers that give the same result in less time: on CPUs, and under LoRA adapters.

PyTorch hands float32 matrix products on the CPU to MKL, which holds back on processors that are
not Intel's; oneDNN, which PyTorch carries as well, ran them 2.1 times as fast on an AMD EPYC
(``perf/README.md``). For the few rows of a decode step both spend most of their time
rearranging the weights, which a rollout can do once for all of its tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional

_ONEDNN = torch.backends.mkldnn.is_available()


def use_fast_linears(model: nn.Module) -> None:
    """Let the linear layers and adapters in ``model`` compute as this module says.

    Their weights and names stay what they are; only the forward of each layer changes.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        elif type(module) is lora.Linear and _is_plain(module):
            module.__class__ = AdaptedLinear


def _is_plain(layer: lora.Linear) -> bool:
    """Whether the layer is one adapter of LoRA's own form, without dropout or variants."""
    dropouts = (getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values())
    biased = any(layer.lora_bias.values())
    return len(layer.lora_A) == 1 and not layer.lora_variant and not any(dropouts) and not biased


class Linear(nn.Linear):
    """``nn.Linear`` with fast products.

    Attributes:
        held: set inside ``rollout_weights`` only, what to multiply with instead of ``weight``.
    """

    held: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.held is not None:
            return _with_held(input.to(self.held.dtype), self.held, self.bias)
        if _through_onednn(input, self.weight):
            return _Product.apply(input, self.weight, self.bias)  # type: ignore[return-value]
        return functional.linear(input, self.weight, self.bias)


class AdaptedLinear(lora.Linear):
    """PEFT's adapted layer, with the adapter's product added in place.

    ``y = x Wᵀ + b + s (x Aᵀ) Bᵀ`` (LoRA: Hu et al., 2021, arXiv:2106.09685, equation 3), all in
    the format of x, which has that of W.

    Attributes:
        held: set inside ``rollout_weights`` only, ``[W; A]`` and ``s Bᵀ`` in W's format.
    """

    held: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = self.base_layer
        if self.disable_adapters or self.merged:
            return base(x)
        (name,) = self.active_adapters
        if self.held is not None:
            return self._from_held(x, *self.held)
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return _AdaptedProduct.apply(  # type: ignore[return-value]
            x, base.weight, base.bias, a, b, self.scaling[name]
        )

    def hold(self) -> None:
        """Join the adapter's first matrix to the weights: one product less for every token."""
        (name,) = self.active_adapters
        weight = _base(self).weight
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        joined, second = torch.cat([weight, a.to(weight.dtype)]), b.T * self.scaling[name]
        self.held = _rearranged(joined), second.to(weight.dtype)

    def _from_held(self, x: Tensor, joined: Tensor, second: Tensor) -> Tensor:
        both = _with_held(x.flatten(0, -2), joined, None)
        output, inner = both.split([second.shape[1], second.shape[0]], 1)
        bias = _base(self).bias
        if bias is not None:
            output = output + bias
        return torch.addmm(output, inner, second).view(*x.shape[:-1], -1)


@contextlib.contextmanager
def rollout_weights(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is trained, and linear layers hold their weights as decoding wants them.

    An adapted float32 layer holds ``W + ΔW`` and skips its adapter, whose two thin products cost
    more for a handful of rows than the wide one they stand beside. A layer in a shorter format
    keeps its adapter: there ``ΔW`` is far below the spacing of ``W`` and would be rounded away,
    and the sampler would not be the policy. Under autocast the weights are cast once. On the CPU
    all of them are rearranged once; elsewhere nothing else is copied, for memory is dear there.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    try:
        for layer in adapted:
            base = _base(layer)
            if base.weight.dtype == torch.float32:
                (name,) = layer.active_adapters
                base.held = _rearranged(base.weight + layer.get_delta_weight(name))
                layer.merged_adapters.append(name)
            elif _has_layout(base.weight):
                layer.hold()
        bases = {_base(layer) for layer in adapted}
        for layer in layers:
            if layer not in bases:
                layer.held = _rearranged(layer.weight)
        yield
    finally:
        for layer in adapted:
            layer.held = None
            layer.merged_adapters.clear()
        for layer in layers:
            layer.held = None


def _base(layer: AdaptedLinear) -> Linear:
    return layer.get_base_layer()  # type: ignore[return-value]


def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias`` without gradient, (…, in) and (out, in) to (…, out)."""
    if _through_onednn(input, weight):
        return _onednn(input, weight, bias)
    return functional.linear(input, weight, bias)


def _through_onednn(input: Tensor, weight: Tensor) -> bool:
    # Products in bfloat16 go to oneDNN by themselves.
    return (
        _ONEDNN
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")  # noqa: SLF001


def _rearranged(weight: Tensor) -> Tensor:
    """The weights in oneDNN's own layout; as they are where it has none."""
    weight = weight.detach()  # a parameter would be registered with the module that holds it
    if torch.is_autocast_enabled(weight.device.type):
        weight = weight.to(torch.get_autocast_dtype(weight.device.type))
    if not _has_layout(weight):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001


def _has_layout(weight: Tensor) -> bool:
    """Whether oneDNN has a layout of its own for these weights."""
    return _ONEDNN and weight.device.type == "cpu" and weight.dtype != torch.float64


def _with_held(input: Tensor, held: Tensor, bias: Tensor | None) -> Tensor:
    if held.is_mkldnn:
        bias = None if bias is None else bias.to(input.dtype)
        return _onednn(input, held, bias)
    return functional.linear(input, held, bias)


class _Product(torch.autograd.Function):
    """``input @ weight.T + bias`` and its gradients, all in oneDNN."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        return _onednn(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        grad = grad_outputs[0]
        rows = grad.flatten(0, -2)
        return (
            product(grad, weight.T) if of_input else None,
            _outer(rows, input.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


class _AdaptedProduct(torch.autograd.Function):
    """A frozen layer's product with the adapter's added; gradients of input and adapter."""

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
        d_a, d_b = _outer(d_inner, rows), _outer(grad, inner).mul_(ctx.scaling)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = product(grad, weight.T).addmm_(d_inner, a)
            d_x = d_x.view(*grad_outputs[0].shape[:-1], -1)
        return d_x, None, None, d_a, d_b, None


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """``left.T @ right``, (n, p) and (n, q) to (p, q), computed in the order that is faster."""
    if left.shape[1] > right.shape[1]:
        return product(right.T, left.T).T
    return product(left.T, right.T)
