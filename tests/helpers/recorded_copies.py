"""Recorders in the place of the functions of torch that copy to and from a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


class Stream:
    """A stream that writes down what is asked of it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: Stream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.calls.append(f"event of {self.name}")
        return f"event of {self.name}"


def record_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Any]:
    """Treat tensors as if they were on a GPU; return the list that records calls, and a stream."""
    calls: list[Any] = []
    second, current = Stream("copies", calls), Stream("computation", calls)
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    methods = {name: getattr(Tensor, name) for name in ("copy_", "to")}

    def allocate(name: str) -> Any:
        def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            calls.extend(["pin"] * pin_memory)
            return originals[name](*args, **kwargs)

        return call

    def copy(name: str) -> Any:
        def call(x: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
            calls.append(f"{name}{' without waiting' * non_blocking}")
            return methods[name](x, *args, **kwargs)

        return call

    def pin(x: Tensor) -> Tensor:
        calls.append("pin")
        return x

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        calls.append(f"begin {stream.name}")
        yield
        calls.append(f"end {stream.name}")

    for name in originals:
        monkeypatch.setattr(torch, name, allocate(name))
    for name in methods:
        monkeypatch.setattr(Tensor, name, copy(name))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda x, stream: calls.append(f"kept for {stream.name}")
    )
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    return calls, second
