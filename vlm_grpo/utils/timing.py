"""Measuring phases, limiting the time of a call, and stopping a run between two steps."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIME_LIMIT_STATUS = 75  # exit status after the time limit: EX_TEMPFAIL of sysexits.h


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


class StepInterrupted(Exception):
    """An interruption of a step by a request to stop."""


class StopRequest:
    """A request to stop: the first SIGINT, SIGTERM or SIGHUP, or an expired time limit.

    It ends the sampling of a step at once; work in ``finishing`` ends before the run does.
    As a context manager it handles the signals; a second signal, other than SIGHUP, raises
    ``KeyboardInterrupt``. A SIGHUP that the process ignores (``nohup``) stays ignored. Outside the
    main thread only the time limit applies, ``max_hours`` from now.
    """

    def __init__(self, max_hours: float | None = None) -> None:
        self.deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._work: tuple[str, float] | None = None  # what a stop waits for, and since when it runs
        self._seconds: dict[str, float] = {}  # of the last work of each kind

    @property
    def reason(self) -> str | None:
        """Return why the run should stop now, or None."""
        if self.signal is not None:
            return self.signal.name
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "the time limit (checkpoint.max_hours)"
        return None

    @property
    def status(self) -> int:
        """Return the exit status: 128 + the signal's number, or 75 for the time limit."""
        return TIME_LIMIT_STATUS if self.signal is None else 128 + self.signal

    def check(self) -> None:
        """Raise ``StepInterrupted`` if a stop was requested."""
        if self.reason is not None:
            raise StepInterrupted

    @contextmanager
    def finishing(self, work: str) -> Iterator[None]:
        """Mark work that a stop waits for, as long as the last one took."""
        started = time.monotonic()
        self._work = work, started
        try:
            yield
        finally:
            self._work = None
        self._seconds[work] = time.monotonic() - started

    def __enter__(self) -> StopRequest:
        with suppress(ValueError):  # not the main thread
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGHUP:  # a closed terminal sends several
                return
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        with suppress(OSError):  # the terminal is gone
            print(
                f"\n{self.signal.name}: {self._describe_rest()}; repeat to stop at once",
                file=sys.stderr,
                flush=True,
            )

    def _describe_rest(self) -> str:
        if self._work is None:
            return "saving the last finished step; what was sampled since is sampled again"
        work, started = self._work
        if work not in self._seconds:
            return f"finishing the {work}, the first, and saving"
        left = max(0.0, started + self._seconds[work] - time.monotonic())
        return f"finishing the {work}, about {left:.0f} s, and saving"
