"""Worker processes that start on first use and are replaced if they end."""

import contextlib
import io
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from types import FunctionType
from typing import Any

from vlm_grpo.errors import UserError
from vlm_grpo.utils import worker_process

START_SECONDS = 300.0
"""Time limit for the start of a worker, and for the imports before a call: on a busy machine
they may take minutes."""


class WorkerError(UserError):
    """Workers do not start, or cannot load what they should call."""


class WorkerEnded(Exception):
    """A worker ended during a call, with an exit code (negative: by that signal)."""

    def __init__(self, exitcode: int) -> None:
        super().__init__(f"exit code {exitcode}")
        self.exitcode = exitcode


class WorkerPool:
    """A pool of worker processes, which may be used from several threads.

    The workers never import the user's program. They end with this process, however it ends, and
    no other signal than SIGKILL ends them. A worker that ends is replaced; the call that it was
    running fails. One that does not start fails every call until the pool is closed. Messages
    name the workers by their work.
    """

    def __init__(self, workers: int, work: str) -> None:
        self.workers, self.work = workers, work
        self._crew: _Crew | None = None
        self._lock = threading.Lock()

    def schedule(
        self, function: Callable[..., Any], arguments: Sequence[Any], seconds: float | None = None
    ) -> Future[Any]:
        """Schedule a call in a worker, which is killed this number of seconds after it has loaded
        the function and the arguments.

        The future raises what the call raises; ``TimeoutError`` if it was killed; ``WorkerEnded``
        if its worker ended; what loading the call raises, or ``WorkerError`` if that is a
        ``UserError``. ``UserError``: a part of the call cannot be sent.
        """
        try:
            call = _Call(dump((function, tuple(arguments))), seconds)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"a call cannot be sent to the {self.work} workers ({error}): define what it needs "
                "in a file of its own, or set rollout.reward_workers=0"
            ) from error
        with self._lock:
            if self._crew is None:
                self._crew = _Crew(self.workers, self.work)
                self._close = weakref.finalize(self, self._crew.close)  # at exit at the latest
            self._crew.calls.put(call)
        return call.future

    def close(self) -> None:
        """Stop the workers; a later call starts new ones."""
        with self._lock:
            if self._crew is not None:
                self._close()
                self._crew = None


def gather(futures: Iterable[Future[Any]]) -> list[Any]:
    """Return the results of scheduled calls, or what they have raised, but a ``WorkerError``."""
    results = [future.exception() or future.result() for future in [*futures]]
    for result in results:
        if isinstance(result, WorkerError):
            raise result
    return results


def dump(value: Any) -> bytes:
    """Pickle a value for a worker; raises what pickle raises, also for a part of ``__main__``."""
    _Pickler(buffer := io.BytesIO()).dump(value)
    return buffer.getvalue()


def is_worker() -> bool:
    return getattr(sys.modules["__main__"], "__file__", None) == worker_process.__file__


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in the program, which workers do not run"
            )
        return NotImplemented


class _LoadError(Exception):
    """A worker could not load a call, because of this exception's cause."""


@dataclass
class _Call:
    content: bytes
    seconds: float | None
    future: Future[Any] = field(default_factory=Future)


class _Worker:
    """A worker process, which ends at the latest when the thread that has started it does."""

    def __init__(self) -> None:
        self.connection, other = Pipe()
        with other:
            number = str(other.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-P", worker_process.__file__, number, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,  # without the signals of the terminal
            )

    def send(self, content: bytes) -> None:
        try:
            self.connection.send_bytes(content)
        except OSError:
            raise WorkerEnded(self.stop()) from None

    def receive(self, seconds: float | None) -> bytes:
        """Return an answer; stop the process if there is none after this number of seconds."""
        try:
            if self.connection.poll(seconds):
                return self.connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerEnded(self.stop()) from None
        self.stop()
        raise TimeoutError(f"no answer after {seconds:g} s")

    def load(self, content: bytes) -> None:
        """Send a call, and wait until its function and arguments are loaded."""
        self.send(content)
        answer = self.receive(START_SECONDS)
        if answer != worker_process.LOADED:
            raise _LoadError from pickle.loads(answer)[1]

    def stop(self) -> int:
        """Kill the process and those that it has started, and return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class _Crew:
    """The threads of a pool; each starts a worker for its first call, and awaits its answers."""

    def __init__(self, size: int, work: str) -> None:
        self.work = work
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.failure: WorkerError | None = None
        self.workers: set[_Worker] = set()
        self._is_closed = False
        # A thread of the crew may collect the pool as garbage, which closes the crew, at any time.
        self._lock = threading.RLock()
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(size)]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (call := self.calls.get_nowait()) is not None:
                call.future.cancel()
        for _ in self.threads:
            self.calls.put(None)
        with self._lock:
            self._is_closed = True
            for worker in self.workers:
                worker.stop()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        worker: _Worker | None = None
        while (call := self.calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                if self.failure is not None:
                    raise self.failure
                try:
                    worker = worker or self._start()
                    worker.load(call.content)
                except WorkerEnded:  # since its last call
                    worker = self._start()
                    worker.load(call.content)
                result, error = pickle.loads(worker.receive(call.seconds))
                if error is not None:
                    raise error
                call.future.set_result(result)
            except _LoadError as failure:
                cause = failure.__cause__
                if isinstance(cause, UserError):  # else it is no fault of the other calls
                    cause = self.failure = WorkerError(
                        f"the {self.work} workers cannot load a call: {cause}"
                    )
                call.future.set_exception(cause)
            except BaseException as error:  # somebody waits for the call, whatever it has raised
                call.future.set_exception(error)

    def _start(self) -> _Worker:
        try:
            with self._lock:
                if self._is_closed:
                    raise WorkerEnded(0)
                self.workers = {worker for worker in self.workers if worker.process.poll() is None}
                self.workers.add(worker := _Worker())
            worker.send(pickle.dumps([path or os.getcwd() for path in sys.path]))
            worker.load(pickle.dumps((int, ())))
            worker.receive(START_SECONDS)
        except (OSError, WorkerEnded) as error:
            self.failure = WorkerError(
                f"the {self.work} workers did not start: {error}; lower rollout.reward_workers "
                "(0: none)"
            )
            raise self.failure from error
        return worker
