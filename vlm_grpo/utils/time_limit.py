"""Limits of the time of a call."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class CallTimeout(BaseException):
    """A call exceeded its time limit. No ``except Exception`` in the called code catches this."""


def can_interrupt() -> bool:
    """Return whether ``time_limit`` works here: in the main thread, and not on Windows."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Callable[..., Any]]:
    """Yield ``call(function, *arguments)``, which interrupts calls that exceed the time limit.

    Such a call raises ``CallTimeout``. Python code and regular expressions are interrupted; other
    compiled code runs to its end. A timer that was set before, such as a test runner's, continues
    afterwards. ``seconds`` None: no limit."""
    if seconds is None:
        yield lambda function, *arguments: function(*arguments)
        return
    running = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if running:  # otherwise the call has just ended
            raise CallTimeout(f"it took longer than its limit of {seconds:g} s")

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
            # Never zero, which would disable the other timer.
            left = max(1e-3, left - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, left, interval)
