"""A fast answer to whether a model on the Hugging Face hub can be loaded at all."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

SECONDS = 5.0
"""Time limit of a connection to the hub."""


def check_reachable(source: str, revision: str = "main") -> None:
    """Refuse a hub name that is neither cached nor reachable, before the hub's client retries.

    Args:
        source: folder of a model, or its name on the hub.
        revision: commit, tag or branch on the hub.

    Raises:
        ConnectionError: the hub cannot be reached.
    """
    if Path(source).is_dir() or constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return  # through a proxy, only the client itself can tell
    try:
        if isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str):
            return
    except ValueError:
        return  # not a hub name: the loader names the problem
    try:
        check_connection()
    except ConnectionError as error:
        raise ConnectionError(
            f"it is neither a folder nor in the hub's cache, and {error}"
        ) from error


def check_connection() -> None:
    """Check at once that the hub can be reached, unless a proxy is between.

    Raises:
        ConnectionError: it cannot.
    """
    if urllib.request.getproxies():
        return  # only the client itself can tell
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"{constants.ENDPOINT} cannot be reached ({error})") from error
