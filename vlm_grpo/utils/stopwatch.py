"""The seconds that phases take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """A stopwatch that adds up seconds per phase, including the phases nested in it."""

    seconds: dict[str, float] = field(default_factory=dict)
    phase: str | None = None  # the innermost running one
    # Called at both ends of a phase: benchmarks synchronize the device, as otherwise only the
    # host's time is measured.
    wait: Callable[[], None] = lambda: None
    # Gives a context around each phase, by its name, with which a profiler marks it.
    annotate: Callable[[str], AbstractContextManager] = nullcontext

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.wait()
        started = time.perf_counter()
        outer, self.phase = self.phase, phase
        try:
            with self.annotate(phase):
                yield
        finally:
            self.wait()
            self.phase = outer
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def reset(self) -> None:
        self.seconds.clear()
