"""Recurrent layers in float64, whose functions in transformers compute in float32."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest

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
