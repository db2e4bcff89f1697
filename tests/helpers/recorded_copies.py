"""Recorders in the place of the functions of torch that copy to and from a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def record_copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Treat tensors as if they were on a GPU; return the list that records calls."""
    calls: list[Any] = []
    empty, methods = torch.empty, {name: getattr(Tensor, name) for name in ("copy_", "to")}

    def allocate(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        calls.extend(["pin"] * pin_memory)
        return empty(*args, **kwargs)

    def copy(name: str) -> Any:
        def call(x: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
            calls.append(f"{name}{' without waiting' * non_blocking}")
            return methods[name](x, *args, **kwargs)

        return call

    def pin(x: Tensor) -> Tensor:
        calls.append("pin")
        return x

    monkeypatch.setattr(torch, "empty", allocate)
    for name in methods:
        monkeypatch.setattr(Tensor, name, copy(name))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    return calls
