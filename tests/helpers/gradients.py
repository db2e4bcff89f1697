"""Comparison of tensors and gradients in tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference over the norm of ``b``, in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def relative_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients over the norm of ``b``."""
    assert set(a) == set(b)
    difference = torch.stack([(a[name] - grad).norm() for name, grad in b.items()]).norm()
    return float(difference / torch.stack([grad.norm() for grad in b.values()]).norm())


def output_and_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the function's output and the gradients of a weighted sum of it."""
    output = function(*tensors)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]
