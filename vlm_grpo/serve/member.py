"""A server as a run knows it: its client, its process, and what is in its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vlm_grpo.errors import UserError
from vlm_grpo.serve.client import VllmClient
from vlm_grpo.serve.process import ServerProcess

POLL_SECONDS = 0.2
"""Seconds between two questions whether a server is ready, or has been given the weights."""
REPORT_SECONDS = 15.0
"""Seconds between two lines of progress."""


@dataclass
class Server:
    """A server, and what is known of it.

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
        """Wait until the server answers, with an occasional line of progress.

        Args:
            timeout: seconds that it may take.
            closed: ends the wait.
            tell: writes a line.

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
        """Free memory until it is given weights again.

        Raises:
            ServiceError: it has failed.
        """
        if self.sleep_level is None or self.is_asleep:
            return
        if self.sleep_level == 0:
            self.client.pause()
            self.client.release_keys()
        else:
            self.client.sleep(self.sleep_level)
        self.is_asleep, self.version = True, None

    def open(self) -> None:
        """Let requests that have begun finish and others wait, with memory for weights.

        Raises:
            ServiceError: it has failed.
        """
        if not self.is_asleep:
            self.client.pause()
        elif self.sleep_level:
            self.client.wake_up("weights")

    def resume(self, version: int, name: str) -> None:
        """Sample with the weights that were loaded after ``open``.

        Args:
            version: their version.
            name: its name on the server.

        Raises:
            ServiceError: it has failed.
        """
        if self.is_asleep:  # keys take memory only now, in which weights arrive in buffers
            self.client.wake_up("kv_cache")
            self.is_asleep = False
        self.client.resume(name)
        self.version = version

    def note(self, problem: str) -> None:
        """Remember a failure, after which its memory is not known."""
        self.problem, self.version, self.is_asleep = problem, None, False
