"""Matrix products by oneDNN.

On the CPU, PyTorch computes float32 matrix products with MKL, which is slow on processors other
than Intel's; oneDNN, which is also part of PyTorch, was 2.1 times as fast on an AMD EPYC
(``perf/README.md``).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


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
    if left.shape[1] > right.shape[1]:
        return product(right.T, left.T).T
    return product(left.T, right.T)


def multiply_by_onednn(
    input: Float[Tensor, "*rows inputs"], weight: Tensor, bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*rows outputs"]:
    """Compute ``product`` by oneDNN, with weights (outputs, inputs) or reordered ones."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")  # noqa: SLF001


def reorder(weight: Float[Tensor, "outputs inputs"]) -> Tensor:
    """Return the weights in the order that oneDNN reads, into which it brings others each time."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001
