"""Comparison of tensors and gradients, also of models that compute in float64 throughout."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def use_float64_recurrence(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Replace float32 by float64 in the functions of a model's gated-delta layers."""
    kinds = {type(m) for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")}
    for kind in kinds:
        module = sys.modules[kind.__module__]
        for name in FUNCTIONS:
            if hasattr(getattr(module, name), "is_float64"):
                continue
            source = inspect.getsource(inspect.unwrap(getattr(module, name)))
            source = source[source.index("def ") :].replace("torch.float32", "torch.float64")
            defined: dict[str, Any] = {}
            exec(compile(source, module.__name__, "exec"), vars(module), defined)
            defined[name].is_float64 = True
            monkeypatch.setattr(module, name, defined[name])


def use_float64(monkeypatch: pytest.MonkeyPatch, *models: Any) -> None:
    """Let models in float64 compute norms, rotations, routers and recurrences in float64 too, where
    differences of 1e-16 would grow to the rounding of float32."""

    def widen(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            return function(*map(_widen, args), **{n: _widen(v) for n, v in named.items()})

        return run

    for model in models:
        use_float64_recurrence(monkeypatch, model)
    functions = (Tensor, "to"), (Tensor, "type"), (Tensor, "softmax"), (torch, "softmax")
    for owner, name in (*functions, (torch.nn.functional, "softmax")):
        monkeypatch.setattr(owner, name, widen(getattr(owner, name)))
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def gradient(loss: Tensor, *inputs: Any) -> Tensor:
    """Return the gradients of all inputs as one vector; those of unused ones are 0."""
    found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in found])


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference over the norm of ``b``, in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def relative_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients over that of ``b``, if this is not 0."""
    assert set(a) == set(b)
    parts = [a[name] - grad for name, grad in b.items()], b.values()
    error, norm = (torch.stack([x.double().norm() for x in part]).norm() for part in parts)
    return float(error / norm if norm else error)


def output_and_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the function's output and the gradients of a weighted sum of it."""
    output = function(*tensors)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]
