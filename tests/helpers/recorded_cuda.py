"""Streams and graphs of ``torch.cuda`` that only record what is done with them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class RecordedCuda:
    """A stand-in for ``torch.cuda`` that records calls.

    Args:
        monkeypatch: replaces its functions.

    Attributes:
        current: name of the current stream.
        events: what was done, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "main"
        self.events: list[str] = []
        pools = itertools.count(1)
        functions = {
            "CUDAGraph": lambda: RecordedGraph(self),
            "Stream": lambda: RecordedStream(self, "side"),
            "current_stream": lambda: RecordedStream(self, self.current),
            "stream": self._use,
            "graph": self._capture,
            "graph_pool_handle": lambda: next(pools),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @contextlib.contextmanager
    def _use(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def _capture(self, graph: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        self.events.append(f"begin in pool {pool}, {capture_error_mode}")
        before, self.current = self.current, "capture"
        try:
            yield
        except RuntimeError:  # as in PyTorch: the end fails, too, and leaves the stream current
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self.current = before
        self.events.append("end")


class RecordedStream:
    """A stream with a name."""

    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: RecordedStream) -> None:
        self.cuda.events.append(f"{self.name} waits for {other.name}")


class RecordedGraph:
    """A graph whose replay runs nothing."""

    def __init__(self, cuda: RecordedCuda) -> None:
        self.cuda = cuda

    def replay(self) -> None:
        self.cuda.events.append("replay")
