"""The HTTP interface of a vLLM server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vlm_grpo.errors import UserError
from vlm_grpo.utils.http_json import ServiceError, get_json, post_command, post_json

SERVED_NAME = "policy"
"""Name of the model on servers for rollouts."""
ADAPTER_NAME = "policy-adapter"
"""Name of its adapter there."""
SHORT_TIMEOUT = 10.0
"""Seconds in which a server must answer a question about its state."""
OLDEST = (0, 32)
"""The oldest version of vLLM whose interface is known to fit."""
START_AS = "start it by vlm-grpo serve, which sets what a run needs"
"""The remedy for a server that cannot sample for a run."""


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


class VllmClient:
    """A client of the server at ``url``, without ``/v1``. Each method may raise ``ServiceError``.

    Sampling and loading must end within ``timeout`` seconds. A server on a CPU runs with
    ``worker/vlm_grpo_worker.py``.
    """

    def __init__(self, url: str, timeout: float, is_on_cpu: bool = False) -> None:
        self.url, self.timeout, self.is_on_cpu = url, timeout, is_on_cpu

    def is_ready(self) -> bool:
        """Return whether the server answers; a refusal, which would not pass, is an answer."""
        try:
            get_json(f"{self.url}/v1/models", timeout=SHORT_TIMEOUT, retries=0)
        except ServiceError as error:
            return error.status is not None and error.status < 500
        return True

    def check(self) -> None:
        """Check that the server can sample for a run.

        Raises:
            UserError: it cannot be reached, or was started without something that a run needs.
        """
        try:
            version = str(self._get("/version", "version"))
            models = self._get("/v1/models", "data")
            self._get("/weight_info", "weight_version")
            try:  # a server that generates from tokens refuses an empty request
                self._post("/inference/v1/generate", {}, SHORT_TIMEOUT)
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

    def generate(self, request: Mapping[str, Any]) -> Any:
        """Return the response to a request of ``build_request``."""
        return self._post("/inference/v1/generate", request, self.timeout)

    def get_version(self) -> str:
        """Return the version of the server's weights."""
        return str(self._get("/weight_info", "weight_version"))

    def load_adapter(self, folder: Path) -> None:
        """Load an adapter in place of the one before."""
        body = {"lora_name": ADAPTER_NAME, "lora_path": str(folder), "load_inplace": True}
        self._command("/v1/load_lora_adapter", body)

    def load_files(self, folder: Path) -> None:
        """Load full weights from safetensors files."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post("/collective_rpc", call, self.timeout)
        if self.is_on_cpu:
            self._post("/collective_rpc", {"method": "pack_tied_weights"}, self.timeout)

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Prepare to receive weights in memory."""
        self._command("/init_weight_transfer_engine", {"init_info": info})

    def start_update(self) -> None:
        """Begin to receive them."""
        self._command("/start_weight_update")

    def update(self, info: Mapping[str, Any]) -> None:
        """Receive some of them."""
        self._command("/update_weights", {"update_info": info})

    def finish_update(self) -> None:
        """Use what was received."""
        self._command("/finish_weight_update", {})

    def get_world_size(self) -> int:
        """Return the number of the server's workers, each with a GPU of its own."""
        return int(self._get("/get_world_size", "world_size"))

    def pause(self) -> None:
        """Finish the requests that have begun, and let others wait for ``resume``."""
        self._command("/pause?mode=wait")

    def resume(self, version: str) -> None:
        """Forget what was computed with older weights, and sample with those of ``version``."""
        # Features of images and keys of prompts are cached by their content alone.
        self._command("/reset_encoder_cache")
        found = self._post("/reset_prefix_cache", None, self.timeout)
        if not (isinstance(found, dict) and found.get("success")):
            raise ServiceError(f"{self.url}: the prefix cache could not be reset")
        self._post("/update_weight_version", {"new_version": version}, self.timeout)
        self._command("/resume")

    def sleep(self, level: int) -> None:
        """Free memory: 1: keys, and weights to the host's memory; 2: keys and weights."""
        self._command(f"/sleep?level={level}&mode=wait")

    def release_keys(self) -> None:
        """Free the memory of keys while the server is paused."""
        self._command("/release_kv_cache_memory")

    def wake_up(self, part: str) -> None:
        """Take the memory of ``weights`` or ``kv_cache`` again."""
        self._command(f"/wake_up?tags={part}")

    def _get(self, path: str, name: str) -> Any:
        found = get_json(self.url + path, timeout=SHORT_TIMEOUT, retries=0)
        if not isinstance(found, dict) or name not in found:
            raise ServiceError(f"{self.url}{path}: the response has no {name}: {str(found)[:300]}")
        return found[name]

    def _command(self, path: str, body: Any = None) -> None:
        post_command(self.url + path, body, self.timeout, retries=0)

    def _post(self, path: str, body: Any, timeout: float) -> Any:
        return post_json(self.url + path, body, timeout=timeout, retries=0)
