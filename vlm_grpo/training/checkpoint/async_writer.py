"""A background thread that runs one job at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)


class AsyncWriter:
    """A thread that runs jobs one after the other and raises their errors in the caller.

    As a context manager it waits for the last job on exit, except after an interrupt. The thread
    does not keep the process alive.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):  # the caller's error must be raised
            try:
                self.wait()
            except Exception:
                logger.exception("a background job failed too")

    def start(self, job: Callable[[], object]) -> None:
        """Wait for the previous job, then start this one.

        Raises:
            BaseException: the error of the previous job.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a finished job, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the job.

        Raises:
            BaseException: the error of the job.
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
        except BaseException as error:  # raised again in the main thread
            self._error = error
