"""vLLM servers of a run: their HTTP interface, their processes, and what is in their memory."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vlm_grpo.errors import UserError
from vlm_grpo.serve import parent_watch
from vlm_grpo.utils.http_json import ServiceError, get_json, post_command, post_json

SERVED_NAME = "policy"  # of the model on servers for rollouts
ADAPTER_NAME = "policy-adapter"  # of its adapter there
SHORT_TIMEOUT = 10.0  # seconds in which a server must answer a question about its state
OLDEST = (0, 32)  # the oldest version of vLLM whose interface is known to fit
START_AS = "start it by vlm-grpo serve, which sets what a run needs"
POLL_SECONDS = 0.2  # between two questions whether a server is ready, or has the weights
REPORT_SECONDS = 15.0  # between two lines of progress
_SHOWN_LINES = 12  # of the log, in a message


class WeightLabel(NamedTuple):
    """The names of versions on a server: of ``adapters`` or ``weights``, and of one run."""

    kind: str
    run: str

    def write(self, version: int) -> str:
        return f"{self.kind}/{self.run}/{version}"

    def read(self, name: str) -> int:
        """Return the version in a name; −1: it is not of this run."""
        prefix, _, version = name.rpartition("/")
        is_own = prefix == f"{self.kind}/{self.run}" and version.isdecimal()
        return int(version) if is_own else -1

    def check(self, name: str) -> None:
        """Check that a server with weights of this name still has the base weights of adapters."""
        if self.kind == "adapters" and name.startswith("weights/"):
            raise UserError(
                "its base weights were replaced by those of a run that trains full weights: "
                "start it again"
            )


class ServerProcess:
    """A server process, which ends with this one, however this one ends.

    ``environment`` is added to this process's; each start appends to ``log``.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.command, self.environment, self.log = list(command), dict(environment), log
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._is_closed = threading.RLock(), False

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
            self.stop()
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                log.write(f"$ {' '.join(self.command)}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [sys.executable, parent_watch.__file__, *self.command],
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
            process, self._process = self._process, None
            if process is None or process.stdin is None:
                return
            process.stdin.close()
            try:
                process.wait(parent_watch.STOP_SECONDS + 5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """Stop the process for good: a thread that would start it again cannot."""
        self._is_closed = True
        self.stop()


@dataclass(eq=False)
class Server:
    """The vLLM server at ``url``, without ``/v1``. Each request may raise ``ServiceError``.

    Sampling and loading must end within ``timeout`` seconds. ``process`` is that which the run has
    started, if any. ``sleep_level`` is what it frees while it rests (``choose_sleep_level``).
    """

    url: str
    timeout: float
    process: ServerProcess | None = None
    sleep_level: int | None = None

    def __post_init__(self) -> None:
        self.version: int | None = None  # of its weights; None: not the run's
        self.problem = ""  # the failure after which it was not yet asked again
        self.failures = 0  # since it last took part in a finished rollout
        self.is_asleep = False
        self.nccl_group: Any = None  # with its workers, once they have joined

    # Its start.

    def is_ready(self) -> bool:
        """Return whether the server answers; a refusal, which would not pass, is an answer."""
        try:
            get_json(f"{self.url}/v1/models", timeout=SHORT_TIMEOUT, retries=0)
        except ServiceError as error:
            return error.status is not None and error.status < 500
        return True

    def wait_until_ready(
        self, timeout: float, closed: threading.Event, tell: Callable[[str], None]
    ) -> None:
        """Wait until the server answers or ``closed`` is set; ``tell`` writes lines of progress."""
        process, start = self.process, time.monotonic()
        last = start
        while not closed.is_set():
            # First: another process may answer at the port of one that could not have it.
            if process is not None and not process.is_running:
                raise UserError(f"the vLLM server ended while it started; {process.describe_log()}")
            if self.is_ready():
                break
            now = time.monotonic()
            if now - start > timeout:
                log = f"; {process.describe_log()}" if process is not None else ""
                raise UserError(
                    f"the vLLM server {self.url} was not ready after {now - start:.0f} s "
                    f"(rollout.vllm.startup_timeout){log}"
                )
            if now - last > REPORT_SECONDS:
                last = now
                told = "" if process is None else f": {process.read_last_lines(1)}"
                wait = f"{now - start:.0f} of at most {timeout:g} s"
                tell(f"waiting for vLLM at {self.url} ({wait}){told}")
            time.sleep(POLL_SECONDS)
        self.check()

    def check(self) -> None:
        """Refuse a server that cannot be reached, or was started without what a run needs."""
        try:
            version = str(self.get("/version", "version"))
            models = self.get("/v1/models", "data")
            self.get("/weight_info", "weight_version")
            try:  # a server that generates from tokens refuses an empty request
                self.post("/inference/v1/generate", {}, SHORT_TIMEOUT)
            except ServiceError as error:
                if error.status != 400:
                    raise
        except ServiceError as error:
            raise UserError(f"{error}: {START_AS}") from error
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if numbers < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise UserError(f"{self.url} runs vLLM {version}: install {oldest} or later")
        served = [str(model["id"]) for model in models]
        if SERVED_NAME not in served:
            raise UserError(f"{self.url} serves {', '.join(served)}: {START_AS}")

    # Its work.

    def generate(self, request: Mapping[str, Any]) -> Any:
        return self.post("/inference/v1/generate", request)

    def get_name(self) -> str:
        """Return the name of the server's weights (``WeightLabel``)."""
        return str(self.get("/weight_info", "weight_version"))

    def find_nccl(self) -> str:
        """Return the version of NCCL in the server's environment; empty: it is not known."""
        try:
            info = get_json(f"{self.url}/server_info", timeout=self.timeout, retries=0)
        except ServiceError:
            return ""
        found = re.search(r"nvidia-nccl-\w+==(\d+\.\d+\.\d+)", str(info))
        return found[1] if found else ""

    # Its memory, and new weights between ``open`` and ``resume``.

    def rest(self) -> None:
        """Free memory until it is given weights again: keys (0), keys and weights (2), or the same
        with weights in the host's memory (1)."""
        if self.sleep_level is None or self.is_asleep:
            return
        if self.sleep_level == 0:
            self.command("/pause?mode=wait")
            self.command("/release_kv_cache_memory")
        else:
            self.command(f"/sleep?level={self.sleep_level}&mode=wait")
        self.is_asleep, self.version = True, None

    def open(self) -> None:
        """Let requests that have begun finish and others wait, with memory for weights."""
        if not self.is_asleep:
            self.command("/pause?mode=wait")
        elif self.sleep_level:
            self.command("/wake_up?tags=weights")

    def resume(self, version: int, name: str) -> None:
        """Sample with the weights loaded after ``open``, whose version has this name there."""
        if self.is_asleep:  # keys take memory only now, in which weights arrive in buffers
            self.command("/wake_up?tags=kv_cache")
            self.is_asleep = False
        # Features of images and keys of prompts are cached by their content alone.
        self.command("/reset_encoder_cache")
        found = self.post("/reset_prefix_cache", None)
        if not (isinstance(found, dict) and found.get("success")):
            raise ServiceError(f"{self.url}: the prefix cache could not be reset")
        self.post("/update_weight_version", {"new_version": name})
        self.command("/resume")
        self.version = version

    def note(self, problem: str) -> None:
        """Remember a failure, after which the state of its memory is unknown."""
        self.problem, self.version, self.is_asleep = problem, None, False
        self.nccl_group = None

    def get(self, path: str, name: str) -> Any:
        """Return a value of a response about the server's state."""
        found = get_json(self.url + path, timeout=SHORT_TIMEOUT, retries=0)
        if not isinstance(found, dict) or name not in found:
            raise ServiceError(f"{self.url}{path}: the response has no {name}: {str(found)[:300]}")
        return found[name]

    def command(self, path: str, body: Any = None) -> None:
        """Send a request whose response says nothing."""
        post_command(self.url + path, body, self.timeout, retries=0)

    def post(self, path: str, body: Any, timeout: float | None = None) -> Any:
        return post_json(self.url + path, body, timeout=timeout or self.timeout, retries=0)
