"""Tools of an OpenEnv server, for which the package openenv has the client."""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from vlm_grpo.environments.clients.sessions import (
    Content,
    SchemaTool,
    SessionEnvironment,
    import_extra,
)
from vlm_grpo.errors import UserError
from vlm_grpo.media.images import encode_png
from vlm_grpo.task.rewards import reward
from vlm_grpo.task.tool_calls import ToolError
from vlm_grpo.types import Candidate, Example
from vlm_grpo.utils import trust

_IMAGES = ("iVBORw0KGgo", "/9j/")  # base64 data of PNG and JPEG
_OTHER = ("metadata", "tool_name", "done", "reward")  # fields that are not shown


class OpenEnv(SessionEnvironment):
    """Tools of an OpenEnv server, which its class derives from MCPEnvironment.

    Attributes:
        url: address of the server, such as http://localhost:8000.
        send_images: whether the server's ``reset`` gets the row's images, as base64 PNG. It gets
            ``seed`` (of the row's id), ``id``, ``question``, ``answer`` and the other columns, as
            far as it takes them.
    """

    url: str
    send_images: bool = False

    def load(self) -> Any:
        return import_extra("openenv.core", "openenv")

    def list_tools(self) -> Iterable[SchemaTool]:
        trust.check(self.url, "a server that gets the rows")
        try:
            with closing(self._connect()) as connection:
                found = connection.step({"type": "list_tools"}).observation.get("tools")
        except (OSError, RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{self.url} does not answer ({reason}): start the server") from error
        if not found:
            raise UserError(f"{self.url} has no tools: derive its class from MCPEnvironment")
        for entry in found:
            yield SchemaTool.read(entry["name"], entry["description"], entry["input_schema"])

    def open(self, example: Example) -> "_Connection":
        row = {"seed": zlib.crc32(example.id.encode()), "id": example.id, **example.meta}
        row |= {"question": example.question, "answer": example.answer}
        if self.send_images:
            images = (image.load() for image in example.images)
            row["images"] = [base64.b64encode(encode_png(image)).decode() for image in images]
        connection = self._connect()
        try:
            connection.shown = _read(connection.client.reset(**row).observation)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> "_Connection":
        return _Connection(self.load().GenericEnvClient(base_url=self.url).sync())

    @reward(weight=1.0, needs_answer=False)
    def server_reward(self, episode: Candidate) -> float:
        """Return the sum of the rewards that the server gave for the calls."""
        return sum(turn.observed.reward for turn in episode.turns if turn.observed is not None)


class _Connection:
    def __init__(self, client: Any) -> None:
        self.client = client
        self.shown: Content = []

    def step(self, action: Mapping[str, Any]) -> Any:
        return self.client.step(action)

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Content, float]:
        found = self.step({"type": "call_tool", "tool_name": name, "arguments": {**arguments}})
        seen = found.observation
        if error := seen.get("error"):
            raise ToolError(error["message"] if isinstance(error, Mapping) else str(error))
        if isinstance(result := seen.get("result"), Mapping):
            seen = result
        content = seen["content"] if isinstance(seen.get("content"), list) else _read(seen)
        if seen.get("is_error"):
            raise ToolError(" ".join(str(part.get("text", "")) for part in content))
        return content, float(found.reward or 0.0)

    def close(self) -> None:
        self.client.close()


def _read(observation: Mapping[str, Any]) -> Content:
    """Return the fields of an observation: a text or JSON, then images."""
    fields = {k: v for k, v in observation.items() if k not in _OTHER and v is not None}
    images = [v for v in fields.values() if isinstance(v, str) and v.startswith(_IMAGES)]
    texts = {k: v for k, v in fields.items() if v not in images}
    text = next(iter(texts.values()), "")
    if len(texts) > 1 or not isinstance(text, str):
        text = json.dumps(texts, ensure_ascii=False)
    parts: list[Mapping[str, Any]] = [{"type": "text", "text": text}] if text else []
    return [*parts, *({"type": "image", "data": data} for data in images)]
