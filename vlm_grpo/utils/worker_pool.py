"""Worker processes that start on first use and are replaced if they end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.context import BaseContext
from typing import Any

from pebble import ProcessPool

from vlm_grpo.errors import UserError

START_SECONDS = 120.0  # time limit in seconds for the start of the workers, including their imports


class WorkerPool:
    """A pool of worker processes, which may be used from several threads.

    The workers end with this process, however it ends, and ignore the signals of its terminal. A
    worker that ends is replaced; the call that it was running fails. The ``context`` must not fork
    this process, which has threads and a GPU. Messages name the workers' work and the setting of
    their number (``names``). Each worker begins with a call of ``initialize``.
    """

    def __init__(
        self,
        workers: int,
        context: BaseContext,
        names: tuple[str, str],
        initialize: Callable[..., None] | None = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        self.workers, self.context, self.names = workers, context, names
        self.initialize = initialize, tuple(arguments)
        self._pool: ProcessPool | None = None
        self._lock = threading.RLock()

    def schedule(
        self, function: Callable[..., Any], arguments: Sequence[Any], seconds: float | None = None
    ) -> Future[Any]:
        """Schedule a call in a worker, which is killed after this number of seconds.

        The future raises what the call raises; ``TimeoutError`` if it was killed; and
        ``ProcessExpired`` or ``BrokenProcessPool`` if its worker ended. ``UserError``: the
        workers do not start."""
        with self._lock:
            if self._pool is None or not self._pool.active:
                self.close()
                self._pool = self._start()
            return self._pool.schedule(function, arguments, timeout=seconds)

    def close(self) -> None:
        """Stop the workers; a later call starts new ones."""
        with self._lock:
            if self._pool is not None:
                self._pool.stop()
                self._pool.join()
                self._pool = None

    def _start(self) -> ProcessPool:
        context: Any = self.context
        pool = ProcessPool(
            self.workers, initializer=_start_worker, initargs=self.initialize, context=context
        )
        try:
            pool.schedule(int).result(START_SECONDS)  # shows that the workers have started
        except Exception as error:
            pool.stop()
            pool.join()
            name, setting = self.names
            raise UserError(
                f"the {name} workers did not start ({error!r}): set {setting}=0, or put "
                'the program that starts the run under if __name__ == "__main__"'
            ) from error
        return pool


def _start_worker(initialize: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    # The pool stops workers by SIGTERM. A handler in Python would not run during compiled code.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a closed terminal; pebble ignores SIGINT
    if initialize is not None:
        initialize(*arguments)
