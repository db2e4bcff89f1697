"""Stopping a run between two steps: on a signal, at a time limit, or as no gradient is finite."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from vlm_grpo.errors import UserError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TIME_LIMIT_STATUS = 75  # exit status after the time limit: EX_TEMPFAIL of sysexits.h

MAX_NONFINITE_STEPS = 5
"""Number of consecutive steps with a skipped update after which a run ends."""


class StepInterrupted(Exception):
    """A request to stop has interrupted the step."""


class StopRequest:
    """A request to stop: the first SIGINT, SIGTERM or SIGHUP, or an expired time limit.

    Sampling is interrupted at once; work inside ``finishing`` is completed first.
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


def check_gradients(step: int, count: int, run_dir: Path) -> None:
    """Warn of the first of ``count`` consecutive steps with a non-finite gradient, which end with
    ``step``; ``UserError``: there are ``MAX_NONFINITE_STEPS``."""
    if count == 1:
        logger.warning("step %d: the gradient is not finite; the update is skipped", step)
    if count >= MAX_NONFINITE_STEPS:
        raise UserError(
            f"the gradient was not finite in {count} consecutive steps; completions of the last "
            f"one, step {step}, are in {run_dir / 'samples'}: continue from the last checkpoint "
            "with a lower optim.lr or policy.dtype=float32"
        )
