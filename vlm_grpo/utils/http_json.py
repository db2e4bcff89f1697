"""Requests of JSON over HTTP that are repeated after failures that may pass."""

import http.client
import json
import logging
import math
import os
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vlm_grpo.errors import printable
from vlm_grpo.utils.parallel_calls import call_all

logger = logging.getLogger(__name__)

FIRST_WAIT = 1.0
"""Seconds before the first repetition; each later wait is twice as long, up to ``LONGEST_WAIT``."""
LONGEST_WAIT = 60.0
"""Longest wait in seconds, which also limits what a ``Retry-After`` header can demand."""
_SILENCE = 15.0
"""Seconds between two lines about requests that are repeated, whichever they are."""
_REPEATED = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
"""Status codes of failures that may pass."""
_LONGEST_RESPONSE = 2**28
"""Largest response in bytes. Log-probs of 32 completions of 4,096 tokens take about 2**23."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts that are asked directly, whatever proxy the environment names."""

# Not the global generator, whose state is part of a run's checkpoint.
_random = random.Random()
_last_line = -math.inf  # time of the last line


class ServiceError(RuntimeError):
    """A service could not be reached (``status`` None), refused a request, or gave no valid
    response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(printable(message))
        self.status = status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that treats a redirect as a failure: headers hold the user's key for one host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def post_json(
    url: str,
    body: Any,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    retries: int = 4,
) -> Any:
    """Send a value as JSON by POST, and return the JSON of the response.

    A request is repeated up to ``retries`` times: if there is no connection, if there is no valid
    response ``timeout`` seconds after it was sent, and after the status 429 or another that may
    pass. The wait before it doubles each time, or is what the response's ``Retry-After`` demands; a
    service that fails again is named in a warning, at most every 15 seconds. Redirects are not
    followed. The environment's ``HTTPS_PROXY`` and ``NO_PROXY`` hold, but not for this machine's
    own address. ``ServiceError``: all attempts failed, or the service refused the request."""
    return _send(url, json.dumps(body).encode(), headers, timeout, retries)


def get_json(
    url: str, headers: Mapping[str, str] | None = None, timeout: float = 60.0, retries: int = 4
) -> Any:
    """Return the JSON of the response to a GET; arguments and errors as in ``post_json``."""
    return _send(url, None, headers, timeout, retries)


def post_command(url: str, body: Any = None, timeout: float = 60.0, retries: int = 4) -> None:
    """Send a POST whose response says nothing; arguments and errors as in ``post_json``."""
    data = b"" if body is None else json.dumps(body).encode()
    _send(url, data, None, timeout, retries, read=len)


def split_address(url: str) -> urllib.parse.SplitResult:
    """Return the parts of a service's address; ``ValueError``: it is none."""
    with suppress(ValueError):  # of brackets, or of a port that is no number
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    shown = url.rpartition("@")[2].partition("?")[0]  # without a password or a key
    raise ValueError(f"{shown!r} must start with http:// or https:// and a host")


def build_authorization(variable: str) -> dict[str, str]:
    """Return the header with the API key in an environment variable.

    ``ValueError``: the variable holds no key; the message does not contain its value.
    """
    key = os.environ.get(variable, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ValueError(f"the environment variable {variable} holds no API key")
    return {"Authorization": f"Bearer {key}"}


def _send(
    url: str,
    data: bytes | None,
    headers: Mapping[str, str] | None,
    timeout: float,
    retries: int,
    read: Callable[[bytes], Any] = json.loads,
) -> Any:
    """Send a request (a GET without data), and return what ``read`` makes of the response."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"address {url!r} must start with http:// or https://")
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, headers)
    is_here = urllib.parse.urlsplit(url).hostname in _LOOPBACK
    proxies = urllib.request.ProxyHandler({} if is_here else None)
    opener = urllib.request.build_opener(_NoRedirect, proxies)
    secrets = [value.split()[-1] for value in headers.values() if value.split()]

    def ask(request: urllib.request.Request) -> tuple[bytes, urllib.error.HTTPError | None]:
        try:
            with opener.open(request, timeout=timeout) as response:
                return response.read(_LONGEST_RESPONSE + 1), None
        except urllib.error.HTTPError as error:
            with error:
                return _read_excerpt(error, secrets).encode(), error

    status = None
    for attempt in range(retries + 1):
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * _random.uniform(0.5, 1.0)
        try:
            # In a thread: a timeout of the socket begins again with every byte.
            (found,) = call_all(ask, [request], 1, timeout)
            if isinstance(found, BaseException):
                raise found
            content, refusal = found
            if len(content) > _LONGEST_RESPONSE:
                raise ValueError(f"the response has more than {_LONGEST_RESPONSE} bytes")
            if refusal is None:
                return read(content)
            status = refusal.code
            reason = f"status {status} {refusal.reason}: {content.decode()}"
            if status not in _REPEATED:
                raise ServiceError(f"{url}: {reason}", status)
            wait = _get_demanded_wait(refusal.headers.get("Retry-After"), wait)
        except TimeoutError:
            reason, status = f"no response within {timeout:g} s", None
        # The last two: invalid JSON.
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            reason, status = f"{type(error).__name__}: {error}", None
        if attempt < retries:
            _tell(url, reason, attempt, wait)
            time.sleep(wait)
    failed = f"{retries + 1} attempts failed, the last with " if retries else ""
    raise ServiceError(f"{url}: {failed}{reason}", status)


def _tell(url: str, reason: str, attempt: int, wait: float) -> None:
    """Warn of a request that is repeated, unless this is its first time or another was told."""
    global _last_line
    if attempt and time.monotonic() - _last_line >= _SILENCE:
        _last_line = time.monotonic()
        logger.warning("%s: %s; asking again in %.0f s", url, printable(reason), wait)


def _read_excerpt(error: urllib.error.HTTPError, secrets: Sequence[str]) -> str:
    try:
        text = " ".join(error.read(1000).decode(errors="replace").split())
    except (OSError, http.client.HTTPException):
        return ""
    for secret in secrets:
        text = text.replace(secret, "…")
    return text[:300]


def _get_demanded_wait(header: str | None, default: float) -> float:
    try:
        return min(LONGEST_WAIT, max(0.0, float(header or "")))
    except ValueError:  # none, or a date, which clocks that differ make unsure
        return default
