"""Other forwards for the layers of a model, whose weights and names do not change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

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
