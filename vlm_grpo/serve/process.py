"""Servers of a run: their processes, which end with it, and what is in their memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_grpo.errors import UserError
from vlm_grpo.serve import guard
from vlm_grpo.serve.client import VllmClient

POLL_SECONDS = 0.2
"""Seconds between two questions whether a server is ready, or has been given the weights."""
REPORT_SECONDS = 15.0
"""Seconds between two lines of progress."""
_SHOWN_LINES = 12
"""Number of lines of the log in a message."""


def find_free_port() -> int:
    """Return a port of this machine that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A server process, which ends with this one, however this one ends.

    ``environment`` is added to this process's; each start appends to ``log``.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.command, self.environment, self.log = list(command), dict(environment), log
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._is_closed = threading.Lock(), False

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; ``UserError``: the command cannot be run, or ``close`` was called."""
        program = self.command[0]
        if not (os.path.isfile(program) and os.access(program, os.X_OK)):
            raise UserError(
                f"{program} is not a program: set rollout.vllm.python to the Python of an "
                "environment with vLLM"
            )
        with self._lock:
            if self._is_closed:
                raise UserError("the vLLM server is not started: the run has ended")
            self._end()
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                log.write(f"$ {' '.join(self.command)}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [sys.executable, guard.__file__, *self.command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | self.environment,
                    start_new_session=True,
                )

    def describe_log(self) -> str:
        return f"its log {self.log} ends with:\n{self.read_last_lines(_SHOWN_LINES)}"

    def read_last_lines(self, count: int) -> str:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - 10_000))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-count:])

    def stop(self) -> None:
        """Stop the process and all that it has started, and wait for their end."""
        with self._lock:  # a second thread returns when the first has finished
            self._end()

    def close(self) -> None:
        """Stop the process for good: a thread that would start it again cannot."""
        self._is_closed = True
        self.stop()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(guard.STOP_SECONDS + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Server:
    """A server of a run.

    Attributes:
        client: its client.
        process: its process, if the run has started it.
        sleep_level: what it frees while it rests (``rollout.vllm.sleep_level``); None: it does not.
        version: version of its weights; None: not the run's.
        problem: the failure after which it was not yet asked again; empty: none.
        failures: number of failures since it last took part in a finished rollout.
        is_asleep: it rests.
    """

    client: VllmClient
    process: ServerProcess | None = None
    sleep_level: int | None = None
    version: int | None = None
    problem: str = ""
    failures: int = 0
    is_asleep: bool = False

    def wait_until_ready(
        self, timeout: float, closed: threading.Event, tell: Callable[[str], None]
    ) -> None:
        """Wait until the server answers or ``closed`` is set; ``tell`` writes lines of progress.

        Raises:
            UserError: its process ends, it is not ready in time, or it does not fit a run.
        """
        process, url = self.process, self.client.url
        start = last = time.monotonic()
        while not closed.is_set():
            # First: another process may answer at the port of one that could not have it.
            if process is not None and not process.is_running:
                raise UserError(f"the vLLM server ended while it started; {process.describe_log()}")
            if self.client.is_ready():
                break
            now = time.monotonic()
            if now - start > timeout:
                log = f"; {process.describe_log()}" if process is not None else ""
                raise UserError(
                    f"the vLLM server {url} was not ready after {now - start:.0f} s "
                    f"(rollout.vllm.startup_timeout){log}"
                )
            if now - last > REPORT_SECONDS:
                last = now
                told = "" if process is None else f": {process.read_last_lines(1)}"
                tell(f"waiting for vLLM at {url} ({now - start:.0f} s){told}")
            time.sleep(POLL_SECONDS)
        self.client.check()

    def rest(self) -> None:
        """Free memory until it is given weights again; ``ServiceError``: it has failed."""
        if self.sleep_level is None or self.is_asleep:
            return
        if self.sleep_level == 0:
            self.client.pause()
            self.client.release_keys()
        else:
            self.client.sleep(self.sleep_level)
        self.is_asleep, self.version = True, None

    def open(self) -> None:
        """Let requests that have begun finish and others wait, with memory for weights."""
        if not self.is_asleep:
            self.client.pause()
        elif self.sleep_level:
            self.client.wake_up("weights")

    def resume(self, version: int, name: str) -> None:
        """Sample with the weights loaded after ``open``, whose version has this name there."""
        if self.is_asleep:  # keys take memory only now, in which weights arrive in buffers
            self.client.wake_up("kv_cache")
            self.is_asleep = False
        self.client.resume(name)
        self.version = version

    def note(self, problem: str) -> None:
        """Remember a failure, after which the state of its memory is unknown."""
        self.problem, self.version, self.is_asleep = problem, None, False
