"""Faster linear layers with equal results: on CPUs, under LoRA adapters, and quantized.

On the CPU, PyTorch computes float32 matrix products with MKL, which is slow on processors other
than Intel's; oneDNN, which is also part of PyTorch, was 2.1 times as fast on an AMD EPYC
(``perf/README.md``).

Weights that bitsandbytes holds in 4 or 8 bits are restored for each product of the forward and the
backward pass, or once for a rollout, and multiplied like any others. A token's values then do not
depend on the tokens beside it. In bitsandbytes' own products they do: a single row in 4 bits has a
kernel of its own, and LLM.int8 (Dettmers et al., 2022, arXiv:2208.07339) chooses by all rows which
columns it computes in 8 bits, after rounding the rows too.
"""

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

from vlm_grpo.model.engine.forwards import has_forward, replace_forward

_ADAPTED = ("Linear", "Linear4bit", "Linear8bitLt")
"""Names of PEFT's adapted linear layers; to look up the last two would import bitsandbytes."""


def has_onednn() -> bool:
    """Return whether PyTorch has oneDNN, and its switch ``torch.backends.mkldnn`` is on."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def uses_onednn(input: Tensor, weight: Tensor) -> bool:
    """Return whether ``product`` is faster by oneDNN than by PyTorch's choice."""
    # PyTorch already computes bfloat16 products with oneDNN. The device comes first, because a
    # compiled step of a GPU cannot ask for oneDNN.
    return (
        input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
        and has_onednn()
        and not torch.is_autocast_enabled("cpu")
    )


def product(
    input: Float[Tensor, "*rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "*rows outputs"]:
    """Compute ``input @ weight.T + bias`` without gradient."""
    if uses_onednn(input, weight):
        return multiply_by_onednn(input, weight, bias)
    return functional.linear(input, weight, bias)


def outer(left: Float[Tensor, "n p"], right: Float[Tensor, "n q"]) -> Float[Tensor, "p q"]:
    """Compute ``left.T @ right`` in the faster order."""
    if left.device.type != "cpu":  # in that of a gradient, which is then not copied
        return left.T @ right
    if left.shape[1] > right.shape[1]:
        return product(right.T, left.T).T
    return product(left.T, right.T)


def multiply(input: Float[Tensor, "*rows p"], matrix: Float[Tensor, "p q"]) -> Tensor:
    """Compute ``input @ matrix`` without gradient."""
    return product(input, matrix.T) if uses_onednn(input, matrix) else input @ matrix


def multiply_by_onednn(
    input: Float[Tensor, "*rows inputs"], weight: Tensor, bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*rows outputs"]:
    """Compute ``product`` by oneDNN, with weights (outputs, inputs) or reordered ones."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")  # noqa: SLF001


def reorder(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """Return the weights in the order that oneDNN reads, into which it brings others each time."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001


def use_fast_linears(model: nn.Module) -> list[Any]:
    """Replace the forward of the model's linear layers and adapters with those of this module, and
    return the adapted layers.

    Modules that are trained beside adapters keep theirs: their weights are rounded for each pass.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    rounded = {module for wrapper in wrappers for module in wrapper.modules_to_save.modules()}
    for module in model.modules():
        if type(module) is nn.Linear and module not in rounded:
            replace_forward(module, _multiply)
        elif _is_supported(module):
            replace_forward(module, _multiply_adapted)
        elif is_quantized(module) and not is_fast(module):
            replace_forward(module, _multiply_quantized)
            vars(module)["dense_dtype"] = model.dtype  # of the matrix of quantized weights
    return [module for module in model.modules() if is_adapted(module)]


def _is_supported(layer: Any) -> bool:
    """Return whether the layer has one adapter, LoRA's or DoRA's, without dropout or bias."""
    if type(layer).__name__ not in _ADAPTED or not isinstance(layer, lora.LoraLayer):
        return False
    dropouts = (getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values())
    others = [v for v in layer.lora_variant.values() if not isinstance(v, DoraLinearVariant)]
    changes = [*others, *filter(None, layer.lora_bias.values()), *filter(None, dropouts)]
    return len(layer.lora_A) == 1 and not changes


def is_quantized(module: nn.Module) -> bool:
    """Return whether it is a linear layer whose weights bitsandbytes holds in 4 or 8 bits."""
    names = ("Params4bit", "Int8Params")
    return isinstance(module, nn.Linear) and type(module.weight).__name__ in names


def is_fast(module: nn.Module) -> bool:
    return has_forward(module, _multiply, _multiply_quantized, _multiply_adapted)


def is_plain(module: nn.Module) -> bool:
    """Return whether it is a linear layer without adapters, and not quantized."""
    return type(module) is nn.Linear or has_forward(module, _multiply)


def is_adapted(module: nn.Module) -> bool:
    return has_forward(module, _multiply_adapted)


def get_base(layer: Any) -> Any:
    return layer.base_layer if is_adapted(layer) else layer


def get_dtype(base: Any) -> torch.dtype:
    return base.dense_dtype if is_quantized(base) else base.weight.dtype


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


def restore_weight(base: Any) -> Tensor:
    return restore(base.weight, get_dtype(base))


def _multiply(layer: Any, _: Any, input: Tensor) -> Tensor:
    if uses_onednn(input, layer.weight):
        return _Product.apply(input, layer.weight, layer.bias)  # type: ignore[return-value]
    return functional.linear(input, layer.weight, layer.bias)


def _multiply_quantized(layer: Any, _: Any, input: Tensor) -> Tensor:
    return _Product.apply(input, layer.weight, layer.bias)  # type: ignore[return-value]


def _multiply_adapted(layer: Any, _: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute PEFT's adapted layer, with the adapter's product added in place.

    ``y = x Wᵀ + b + s (x Aᵀ) Bᵀ`` (LoRA: Hu et al., 2021, arXiv:2106.09685, equation 3), computed
    in the dtype of x, which is W's. DoRA multiplies each output by ``m / ‖W + s B A‖``, with the
    norm of its row, which has no gradient (Liu et al., 2024, arXiv:2402.09353, section 4.3).
    """
    base = layer.base_layer
    if _is_off(layer):
        return base(x)
    has_norms = bool(layer.lora_magnitude_vector)
    bias = None if has_norms else base.bias
    factors = vars(layer).get("cast_factors")
    if factors is None or factors[0].dtype != x.dtype:
        a, b, scaling = _get_factors(layer)
        factors = a, b, scaling, ()
        if a.dtype != x.dtype:
            (factors,) = _cast([a], [b], scaling, x.dtype)
    output: Any = _AdaptedProduct.apply(x, base.weight, bias, *factors)
    if not has_norms:
        return output
    output = output * _compute_dora_factors(layer).to(output.dtype)
    return output if base.bias is None else output + base.bias


def _is_off(layer: Any) -> bool:
    return layer.disable_adapters or layer.merged


@contextlib.contextmanager
def cast_together(layers: Iterable[Any]) -> Iterator[None]:
    """Let the adapted layers of a half-precision model read factors inside that are cast here.

    That takes a few operations for all layers of a shape, forward and backward, in place of eight
    for each one. A layer that is recomputed after the end casts its own, to the same values.
    """
    groups: dict[Any, list[tuple[Any, Tensor, Tensor]]] = {}
    for layer in layers:
        if not _is_off(layer):
            (a, b, scaling), dtype = _get_factors(layer), get_dtype(layer.base_layer)
            if a.dtype != dtype:
                key = a.shape, b.shape, scaling, dtype, a.device, a.requires_grad
                groups.setdefault(key, []).append((layer, a, b))
    try:
        for (*_, scaling, dtype, _, _), members in groups.items():
            own, first, second = zip(*members, strict=True)
            for layer, factors in zip(own, _cast(first, second, scaling, dtype), strict=True):
                vars(layer)["cast_factors"] = factors
        yield
    finally:
        for members in groups.values():
            for layer, *_ in members:
                vars(layer).pop("cast_factors", None)


def _cast(
    first: Sequence[Tensor], second: Sequence[Tensor], scaling: float, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, float, tuple[Tensor, Tensor]]]:
    """Yield each pair of A and ``s B`` in another dtype, a scaling of 1, and their transposes."""
    a: Any = _CastTogether.apply(dtype, 1.0, *first)
    b: Any = _CastTogether.apply(dtype, scaling, *second)
    count = len(first)
    for *factors, a_t, b_t in zip(a[:count], b[:count], a[count:], b[count:], strict=True):
        yield *factors, 1.0, (a_t, b_t)


def _get_factors(layer: Any) -> tuple[Any, Any, float]:
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


@torch.no_grad()
def _add_product(layer: Any) -> Tensor:
    """Return ``W + s B A``, in the adapter's dtype."""
    a, b, scaling = _get_factors(layer)
    return restore_weight(layer.base_layer) + (b @ a) * scaling


def _compute_dora_factors(layer: Any) -> Tensor:
    (name,) = layer.active_adapters
    return layer.lora_magnitude_vector[name].weight / _add_product(layer).norm(dim=1)


@torch.no_grad()
def merge(layer: Any) -> Tensor:
    """Return ``W + s B A`` in the adapter's dtype, with DoRA's factors."""
    weight = _add_product(layer)
    return weight * _compute_dora_factors(layer)[:, None] if layer.lora_magnitude_vector else weight


@torch.no_grad()
def cast_factors(layer: Any) -> tuple[Tensor | None, ...]:
    """Return A, ``s B`` and, with DoRA, its factors (else None), in W's dtype."""
    (a, b, scaling), dtype = _get_factors(layer), get_dtype(layer.base_layer)
    norms = _compute_dora_factors(layer).to(dtype) if layer.lora_magnitude_vector else None
    return a.detach().to(dtype), (b * scaling).to(dtype), norms


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
            multiply(grad, restore(weight, grad.dtype)) if needs_input else None,
            outer(rows, input.flatten(0, -2)) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class _CastTogether(torch.autograd.Function):
    """The multiples of n matrices of one shape in another dtype, and their transposes."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, scaling: float, *matrices: Float[Tensor, "p q"]
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.scaling = matrices[0].dtype, scaling
        ctx.set_materialize_grads(False)
        cast = torch.stack(matrices)
        cast = (cast if scaling == 1.0 else cast.mul_(scaling)).to(dtype)
        transposed = cast.mT.unbind()
        ctx.mark_non_differentiable(*transposed)
        return *cast.unbind(), *transposed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = grad_outputs[: len(grad_outputs) // 2]
        known = torch.stack([grad for grad in grads if grad is not None]).to(ctx.dtype)
        found = iter((known if ctx.scaling == 1.0 else known.mul_(ctx.scaling)).unbind())
        return None, None, *(None if grad is None else next(found) for grad in grads)


class _AdaptedProduct(torch.autograd.Function):
    """The output of a frozen layer and its adapter, with gradients of the input and the adapter.

    The factors are in the precision of x; ``transposed`` has their transposes, if there are some.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "*rows inputs"],
        weight: Tensor,
        bias: Tensor | None,
        a: Float[Tensor, "rank inputs"],
        b: Float[Tensor, "outputs rank"],
        scaling: float,
        transposed: tuple[Tensor, ...],
    ) -> Float[Tensor, "*rows outputs"]:
        rows = x.flatten(0, -2)
        inner = rows @ transposed[0] if transposed else product(rows, a)
        output = product(rows, restore(weight, x.dtype), bias)
        output.addmm_(inner, transposed[1] if transposed else b.T, alpha=scaling)
        ctx.save_for_backward(rows, weight, a, b, inner)
        ctx.scaling = scaling
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, a, b, inner = ctx.saved_tensors
        grad = grad_outputs[0].flatten(0, -2)
        d_inner = multiply(grad, b)
        d_b = outer(grad, inner)
        if ctx.scaling != 1.0:
            d_inner.mul_(ctx.scaling)
            d_b.mul_(ctx.scaling)
        d_a, d_x = outer(d_inner, rows), None
        if ctx.needs_input_grad[0]:
            d_x = multiply(grad, restore(weight, grad.dtype)).addmm_(d_inner, a)
            d_x = d_x.view(*grad_outputs[0].shape[:-1], -1)
        return d_x, None, None, d_a, d_b, None, None
