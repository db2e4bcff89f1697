"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Seconds by phase; phases may nest, each counts its own whole time.

    Attributes:
        seconds: seconds spent in each phase since the last ``reset``.
        wait: called at the beginning and the end of each phase; a benchmark on an accelerator
            lets it wait for the device, without which only the host's time is seen.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    wait: Callable[[], None] = lambda: None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.wait()
        started = time.perf_counter()
        try:
            yield
        finally:
            self.wait()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def reset(self) -> None:
        self.seconds.clear()
