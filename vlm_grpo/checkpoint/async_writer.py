"""One piece of work at a time beside the main thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)


class Background:
    """Runs jobs in a thread, one after the other; what a job raises comes up in the caller.

    A context: leaving it waits for the last job, unless the user interrupts. The thread itself
    does not keep the process alive.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):  # what ended the caller is told, this beside it
            try:
                self.wait()
            except Exception:
                logger.exception("the work in the background failed too")

    def start(self, job: Callable[[], object]) -> None:
        """Wait for the job before, then begin with this one.

        Raises:
            BaseException: what the job before raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what a job that has ended raised; never waits."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the job.

        Raises:
            BaseException: what it raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # raised in the main thread, where somebody hears it
            self._error = error
