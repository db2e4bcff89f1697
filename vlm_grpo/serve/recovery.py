"""Recovery of vLLM servers that die, hang or answer with errors, and when a run gives up."""

import logging
import threading
from collections.abc import Callable

from vlm_grpo.config.rollout import VllmSettings
from vlm_grpo.errors import UserError
from vlm_grpo.serve.server import Server, WeightLabel
from vlm_grpo.utils.http_json import ServiceError

logger = logging.getLogger(__name__)


class Recovery:
    """Notes the failures of ``servers``, starts those of the run again, asks others again, and
    drops from the list those that are gone.

    ``closed`` is set when the run stops: failures then mean nothing.
    """

    def __init__(
        self,
        servers: list[Server],
        settings: VllmSettings,
        label: WeightLabel,
        closed: threading.Event,
        announce: Callable[[str], None],
    ) -> None:
        self.servers, self.settings, self.label = servers, settings, label
        self.closed, self.announce = closed, announce
        self._lock = threading.Lock()

    def check_open(self) -> None:
        if self.closed.is_set():
            raise UserError("the run was stopped while its completions were sampled")

    def note(self, server: Server, error: ServiceError) -> None:
        with self._lock:
            if server.problem or self.closed.is_set():
                return
            server.note(str(error))
        if server.process is not None:
            server.process.stop()  # ends the other requests, which may hang

    def attempt(self, server: Server, request: Callable[[], None]) -> bool:
        """Make a request, note its failure, and return whether it was answered."""
        try:
            request()
        except ServiceError as error:
            self.note(server, error)
        return not server.problem

    def recover(self, server: Server) -> None:
        """Restart a server, ask one of others again, or drop it if it is gone.

        ``UserError``: it failed too often in one rollout, or no server is left.
        """
        self.check_open()
        problem, server.problem = server.problem, ""
        server.failures += 1
        limit = self.settings.max_restarts
        if server.process is not None:
            if server.failures > limit:
                raise UserError(
                    f"the vLLM server failed {server.failures} times in one rollout "
                    f"(rollout.vllm.max_restarts={limit}): {problem}; resume=true continues once "
                    f"the cause is gone; {server.process.describe_log()}"
                )
            logger.warning(
                "the vLLM server failed (%s) and is restarted (%d of %d); its log is %s",
                *(problem, server.failures, limit, server.process.log),
            )
            server.process.start()
            self.wait_until_ready(server)
        elif server.failures > limit or not server.is_ready():
            self.servers.remove(server)
            if not self.servers:
                raise UserError(
                    f"the last vLLM server failed: {problem}; start the servers of "
                    "rollout.vllm.urls again, and continue with resume=true"
                )
            logger.warning(
                "the vLLM server %s failed (%s) and gets no more requests; %d are left",
                *(server.url, problem, len(self.servers)),
            )
        else:
            logger.warning(
                "the vLLM server %s failed (%s) and is asked again (%d of %d)",
                *(server.url, problem, server.failures, limit),
            )

    def wait_until_ready(self, server: Server) -> None:
        server.wait_until_ready(self.settings.startup_timeout, self.closed, self.announce)
        try:
            self.label.check(server.get_name())
        except UserError as error:
            raise UserError(f"{server.url}: {error}") from error
