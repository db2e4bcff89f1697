"""Ending a run on request: signals and time limits, noted at once, obeyed between two updates."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TIME_LIMIT_STATUS = 75
"""Exit status after a time limit: "try again" (sysexits.h)."""


class StopRequest:
    """Notes the first SIGINT or SIGTERM, or that the time is up; a second signal ends at once.

    Handlers are installed while the context is open. Outside the main thread no signal can be
    caught, and only the time limit holds.

    Args:
        max_hours: the most hours from here on; None: no limit.
    """

    def __init__(self, max_hours: float | None = None) -> None:
        self.deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def reason(self) -> str | None:
        """Why the run should end now, or None."""
        if self.signal is not None:
            return self.signal.name
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "the time limit (checkpoint.max_hours)"
        return None

    @property
    def status(self) -> int:
        """Exit status that says why: 128 + the signal's number, or 75 for the time limit."""
        return TIME_LIMIT_STATUS if self.signal is None else 128 + self.signal

    def __enter__(self) -> StopRequest:
        try:
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        print(
            f"\n{self.signal.name}: finishing this update and saving; once more to stop at once",
            file=sys.stderr,
            flush=True,
        )
