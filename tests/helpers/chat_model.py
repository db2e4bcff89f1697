"""A model behind a local server: it answers by the question, and fails as a test tells it to."""

import base64
import io
import json
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from judge_server import JudgeServer, Reply, run_judge
from PIL import Image

Answer = Callable[[str, Image.Image | None], str]


def count_by_checksum(text: str, image: Image.Image | None) -> str:
    """Return a number that depends on every letter of the question and on every pixel."""
    pixels = b"" if image is None else image.tobytes()
    return str(zlib.crc32(text.encode() + pixels) % 7)


@dataclass
class ChatModel:
    answer: Answer = count_by_checksum  # to a question and its first image
    # The failure by the question and the number of equal ones before; None: it is answered.
    fail: Callable[[str, int], Reply | None] = lambda text, earlier: None
    prompt_tokens: int | None = 100  # that it reports; None: it does not
    models: tuple[str, ...] = ("policy",)
    seconds: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of the questions so far
    most: int = 0  # questions that were open at once

    def __post_init__(self) -> None:
        self._lock, self._open, self._asked = threading.Lock(), 0, Counter[str]()

    @property
    def questions(self) -> list[str]:
        return [get_text(body) for body in self.bodies]

    def respond(self, body: Any) -> Reply:
        """Return the reply to a question, or the list of models to a request without a body."""
        if body is None:
            models = [{"id": name, "object": "model"} for name in self.models]
            return Reply(body=json.dumps({"object": "list", "data": models}).encode())
        text = get_text(body)
        with self._lock:
            self.bodies.append(body)
            request = json.dumps(body["messages"])
            failure = self.fail(text, self._asked[request])
            self._asked[request] += 1
            self._open += 1
            self.most = max(self.most, self._open)
        try:
            if self.seconds:
                threading.Event().wait(self.seconds)
            return failure or self._answer(body, text)
        finally:
            with self._lock:
                self._open -= 1

    def _answer(self, body: Any, text: str) -> Reply:
        images = get_images(body)
        message = {"role": "assistant", "content": self.answer(text, images[0] if images else None)}
        response: dict[str, Any] = {"choices": [{"message": message, "finish_reason": "stop"}]}
        if self.prompt_tokens is not None:
            response["usage"] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 2}
        return Reply(body=json.dumps(response).encode())


def get_text(body: Any) -> str:
    return body["messages"][-1]["content"][-1]["text"]


def get_images(body: Any) -> list[Image.Image]:
    parts = body["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    data = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
    return [Image.open(io.BytesIO(content)) for content in data]


def serve(model: ChatModel) -> AbstractContextManager[JudgeServer]:
    return run_judge(model.respond)
