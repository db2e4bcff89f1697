"""Streams and graphs of ``torch.cuda`` that only record what is done with them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class RecordedCuda:
    """A stand-in for ``torch.cuda``: the current stream, and what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "main"
        self.events: list[str] = []
        pools = itertools.count(1)
        functions = {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.events.append("replay")),
            "Stream": lambda: self._get_stream("side"),
            "current_stream": lambda: self._get_stream(self.current),
            "stream": self._use,
            "graph": self._capture,
            "graph_pool_handle": lambda: next(pools),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def _get_stream(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.events.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    @contextlib.contextmanager
    def _use(self, stream: Any) -> Iterator[None]:
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
