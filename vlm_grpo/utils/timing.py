"""Where a step's time goes, and how long a call may take."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


@dataclass
class Stopwatch:
    """Seconds by phase; phases may nest, each counts its own whole time.

    Attributes:
        seconds: seconds spent in each phase since the last ``reset``.
        phase: the innermost phase that is going on; None between phases.
        wait: called at the beginning and the end of each phase; a benchmark on an accelerator
            lets it wait for the device, without which only the host's time is seen.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    phase: str | None = None
    wait: Callable[[], None] = lambda: None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.wait()
        started = time.perf_counter()
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.wait()
            self.phase = outer
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def reset(self) -> None:
        self.seconds.clear()


class TookTooLong(BaseException):
    """A call was interrupted; no ``except Exception`` of the called code can hold this up."""


def can_interrupt() -> bool:
    """Whether ``time_limit`` can interrupt a call here: in the main thread, not on Windows."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Callable[..., Any]]:
    """A way to call functions, ``call(function, *arguments)``, that interrupts what takes longer.

    Python code is interrupted, regular expressions too; other compiled code that holds on runs
    to its end. A timer that was set before (of a test runner, say) goes on afterwards.

    Args:
        seconds: the most that one call may take; None: any time.

    Raises:
        TookTooLong: from the call, where it took longer.
    """
    if seconds is None:
        yield lambda function, *arguments: function(*arguments)
        return
    running = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if running:  # else the call had just ended
            raise TookTooLong(f"it took longer than its limit of {seconds:g} s")

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal running
        running = True
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return function(*arguments)
        finally:
            running = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    started = time.monotonic()
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield call
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            # At least a moment: zero would switch the other timer off.
            left = max(1e-3, left - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, left, interval)
