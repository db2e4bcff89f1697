"""A server that a run starts, and that ends with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlm_grpo.errors import UserError
from vlm_grpo.serve import guard

_SHOWN_LINES = 12
"""Number of lines of the log in a message."""


def find_free_port() -> int:
    """Return a port of this machine that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServerProcess:
    """A server process, which ends with this one, however this one ends.

    Args:
        command: the command.
        environment: variables in addition to this process's.
        log: file for the server's output; a later start appends to it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.command, self.environment, self.log = list(command), dict(environment), log
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._is_closed = threading.Lock(), False

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process.

        Raises:
            UserError: the command cannot be run, or ``close`` was called.
        """
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
            self._start()

    def _start(self) -> None:
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
        """Name the log, and quote its end."""
        return f"its log {self.log} ends with:\n{self.read_last_lines(_SHOWN_LINES)}"

    def read_last_lines(self, count: int) -> str:
        """Return the last lines of the log."""
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
