"""Questions to a model behind an address with the interface of OpenAI's chat completions."""

import base64
import logging
import mimetypes
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vlm_grpo.errors import UserError, bullets, printable
from vlm_grpo.media.images import encode_data_url, encode_png
from vlm_grpo.task.coordinates import CoordinateFrame
from vlm_grpo.types import Completion, VideoRef
from vlm_grpo.utils.chat import THINK_TAGS, ThinkingTags, Turn
from vlm_grpo.utils.http_json import (
    ServiceError,
    build_authorization,
    get_json,
    post_json,
    split_address,
)

logger = logging.getLogger(__name__)

API_KEY = "OPENAI_API_KEY"  # environment variable whose key is sent if it is set


@dataclass(frozen=True)
class Endpoint:
    """The address of a model, and how to ask it; ``UserError``: a value is not valid."""

    url: str  # up to ``/v1``, which is added to an address without a path
    model: str | None = None  # its name there; None: the only one that it serves
    concurrency: int = 16  # maximum number of requests at once
    # Of boxes if ``Settings.model`` is ``none``; None: pixels of the original image.
    frame: CoordinateFrame | None = None
    timeout: float = 600.0  # seconds to wait for a response
    retries: int = 6

    def __post_init__(self) -> None:
        try:
            parts = split_address(self.url)
        except ValueError as error:
            raise UserError(f"server {error}") from None
        if parts.username or parts.query:  # which may be secrets, and errors name the address
            raise UserError(
                f"server {parts.scheme}://{parts.hostname}/…: an address has no user, password or "
                f"query: put an API key into the environment variable {API_KEY}"
            )
        if self.concurrency < 1:
            raise UserError(f"concurrency is {self.concurrency}; it must be at least 1")

    @property
    def base(self) -> str:
        url = self.url.rstrip("/")
        return url if urllib.parse.urlsplit(url).path else f"{url}/v1"


@dataclass(frozen=True)
class Answer:
    """A model's answer to one request, with the numbers of tokens that the server counts, if any.

    The completion has no tokens, which the interface does not return.
    """

    completion: Completion
    prompt_tokens: int | None
    completion_tokens: int | None


class ChatClient:
    """A client of one ``model`` at an address, which may be used from several threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._limit = "max_tokens"
        self._headers: Mapping[str, str] = {}
        if os.environ.get(API_KEY):
            try:
                self._headers = build_authorization(API_KEY)
            except ValueError as error:
                raise UserError(f"{error}: set it") from error
        self._served = served = self._list_models()
        if not endpoint.model and len(served) != 1:
            found = f"serves\n{bullets(served)}\n" if served else "lists no models: "
            raise UserError(f"{endpoint.base} {found}give the name of one with --served-model")
        self.model = endpoint.model or served[0]
        self._name = self.model  # by which it answers

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        tags: ThinkingTags = THINK_TAGS,
    ) -> Answer:
        """Return the answer to messages of ``build_messages``.

        ``options`` are further fields of the request. Thinking that the server returns apart from
        the text is marked by ``tags``. ``ServiceError``: this request fails; ``UserError``: all do.
        """
        url = f"{self.endpoint.base}/chat/completions"
        limit, options = self._limit, dict(options)
        if "max_tokens" in options:  # which some servers refuse
            options[limit] = options.pop("max_tokens")
        body = {"model": self.model, "messages": messages, **options}
        try:
            response = post_json(
                url, body, self._headers, self.endpoint.timeout, self.endpoint.retries
            )
        except ServiceError as error:
            renamed = "max_completion_tokens"  # which older servers lack
            if error.status == 400 and limit != renamed and renamed in str(error):
                self._limit = renamed
                return self.ask(messages, options, tags)
            raise self._explain(error) from error
        answer = _read_answer(response, url, tags)
        self._check_model(response.get("model"))
        return answer

    def _check_model(self, name: Any) -> None:
        """Refuse the answer of another model that is served; a new name is told once.

        Servers answer ``gpt-4o`` as ``gpt-4o-2024-08-06``, and some by the name of a file.
        """
        known = self.model, self._name
        if not isinstance(name, str) or any(_is_same(name, own) for own in known):
            return
        name = printable(name)
        if name in self._served or self._name != self.model:
            raise UserError(
                f"{self.endpoint.base} was asked for {self._name}, and {name} answered: give the "
                "name of the model to evaluate with --served-model"
            )
        logger.warning("%s answers as %s, asked for %s", self.endpoint.base, name, self.model)
        self._name = name

    def _list_models(self) -> list[str]:
        url = f"{self.endpoint.base}/models"
        try:
            # A wrong address must not take a minute to be named.
            response = get_json(url, self._headers, retries=1)
            return [printable(str(entry["id"])) for entry in response["data"]]
        except ServiceError as error:
            if error.status in (401, 403):
                raise self._explain(error) from error
            if error.status is None:
                raise UserError(f"no server of chat completions answers: {error}") from error
            return []
        except (KeyError, TypeError):
            return []

    def _explain(self, error: ServiceError) -> ServiceError | UserError:
        """Return the error of a request; a ``UserError`` if others would fail, too."""
        if error.status in (401, 403):
            if self._headers:
                return UserError(f"the server refuses the API key in {API_KEY}: {error}")
            return UserError(
                f"the server asks for an API key: put it into the environment variable "
                f"{API_KEY} ({error})"
            )
        if error.status == 404:
            served = f"; it serves\n{bullets(self._served)}" if self._served else ""
            return UserError(
                f"the server has no model {self.model}, or another address than "
                f"{self.endpoint.base}: {error}{served}"
            )
        return error


def build_messages(
    turns: Sequence[Turn], media: Sequence[Image.Image | str]
) -> list[dict[str, Any]]:
    """Build the messages of turns; ``media`` are an image or a clip's URL for each ``<image>``."""
    parts, messages = map(_build_part, media), []
    for turn in turns:
        content = turn.build_content(parts) if turn.role == "user" else turn.text
        messages.append({"role": turn.role, "content": content})
    return messages


def _build_part(medium: Image.Image | str) -> dict[str, Any]:
    if isinstance(medium, str):
        return {"type": "video_url", "video_url": {"url": medium}}
    # The least compression: it takes a quarter of the default's time for a sixth more bytes.
    url = encode_data_url(medium, compress_level=1)
    return {"type": "image_url", "image_url": {"url": url}}


def encode_clip(clip: VideoRef) -> str:
    """Return a clip's file as a ``data:`` URL, or its frames as vLLM takes them."""
    if not clip.frames:
        kind = mimetypes.guess_type(clip.name)[0] or "video/mp4"
        return f"data:{kind};base64,{base64.b64encode(clip.read_bytes()).decode()}"
    # As PNG, which vLLM reads, too, without loss.
    frames = (encode_png(frame, compress_level=1) for frame in clip.load_frames())
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(f).decode() for f in frames)


def _is_same(name: str, asked: str) -> bool:
    """Return whether a name is the one asked for, but for a folder before it or a date behind."""
    own = asked.rpartition("/")[2]
    return re.fullmatch(re.escape(own) + r"(-\d{4}[\d-]*)?", name.rpartition("/")[2]) is not None


def _read_answer(response: Any, url: str, tags: ThinkingTags) -> Answer:
    try:
        choice = response["choices"][0]
        message, usage = choice["message"], response.get("usage") or {}
        text = message["content"]
        thinking = message.get("reasoning_content") or message.get("reasoning")  # vLLM: both
        if isinstance(thinking, str) and isinstance(text, str | None):
            opening = "" if tags.is_open else tags.opening
            # A thinking that was cut off has no end.
            text = f"{opening}{thinking}" + (f"{tags.closing}{text}" if text else "")
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        stop = "length" if choice.get("finish_reason") == "length" else "eos"
    except (KeyError, IndexError, TypeError, AttributeError):
        text, counts, stop = 0, [None, None], "eos"
    if not isinstance(text, str | None):  # None: such as a refusal, or thinking that was cut off
        raise ServiceError(f"{url}: the response has no answer: {str(response)[:300]}")
    prompt_tokens, tokens = (count if isinstance(count, int) else None for count in counts)
    return Answer(Completion.from_text(text or "", stop), prompt_tokens, tokens)
