"""Other forwards for the layers of a model, whose weights and names do not change: RMS norms by
PyTorch's fused kernel.

On a GPU transformers' RMS norm launches six to eight kernels. Each of them reads and writes all
hidden states, and the backward pass needs several float32 copies. ``rms_norm`` launches one kernel.
It rounds half-precision results once; transformers also rounds before the product with the weights.
Not run on a GPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

Forward = Callable[..., Any]
"""Computes a module's output from the module, its own forward as a function, and its inputs."""


def replace_forward(module: nn.Module, forward: Forward) -> None:
    """Let ``forward(module, original, …)`` compute the module's output.

    Its class becomes a subclass, as in ``torch.nn.utils.parametrize``.
    """
    # A copy of the module then calls itself, and keeps its type. A bound function as an attribute
    # would make a reference cycle, so that a model's memory is freed only by Python's collector.
    if not has_forward(module, forward):
        module.__class__ = _derive(type(module), forward)


def restore_forward(module: nn.Module, forward: Forward) -> None:
    """Undo ``replace_forward`` where it was the last for this module."""
    if has_forward(module, forward):
        module.__class__ = type(module).__mro__[1]


def has_forward(module: nn.Module, *forwards: Forward) -> bool:
    """Return whether one of the functions computes the module's output."""
    return getattr(type(module), "replaced_by", None) in forwards


@functools.cache
def _derive(kind: type[nn.Module], forward: Forward) -> type[nn.Module]:
    original = kind.forward

    @functools.wraps(original)  # transformers reads its signature
    def run(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        return forward(self, original, *inputs, **options)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "forward": run, "replaced_by": forward})


def use_fused_norms(model: nn.Module) -> None:
    """Let the model's RMS norms use the fused kernel where there is one."""
    # Norms of another formula stay as they are: Gemma's multiplies by 1 + w in float32.
    for module in model.modules():
        if getattr(module, "weight", None) is not None and _can_fuse(type(module)):
            replace_forward(module, _normalize)


def is_fused(module: nn.Module) -> bool:
    """Return whether it is a norm that uses the kernel where there is one."""
    return has_forward(module, _normalize)


def has_kernel(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel computes the norm of these tensors as transformers does."""
    # transformers computes norms in float32 whatever the precision.
    return hidden.is_cuda and hidden.dtype == weight.dtype != torch.float64


def _normalize(norm: Any, original: Any, hidden_states: Tensor, *others: Any, **named: Any) -> Any:
    if others or named or not has_kernel(hidden_states, norm.weight):
        return original(norm, hidden_states, *others, **named)
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return rms_norm(hidden_states, norm.weight.shape, norm.weight, epsilon)


@functools.cache
def _can_fuse(kind: type[Any]) -> bool:
    if not kind.__name__.endswith("RMSNorm") or issubclass(kind, nn.RMSNorm):
        return False
    with torch.device("cpu"), torch.no_grad():
        hidden = torch.linspace(-2.0, 3.0, 8, dtype=torch.float32).view(2, 4)
        weight = torch.linspace(0.5, 2.0, 4, dtype=torch.float32)
        try:
            norm = kind(4, eps=0.5).float()
            norm.weight.copy_(weight)
            is_same = torch.allclose(norm(hidden), rms_norm(hidden, (4,), weight, 0.5))
        except (TypeError, AttributeError):  # other arguments, or without weights
            return False
    return is_same and 0.5 in (getattr(norm, "variance_epsilon", None), getattr(norm, "eps", None))
