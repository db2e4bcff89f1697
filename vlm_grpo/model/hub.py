"""A fast answer to whether the Hugging Face hub can be used at all."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

SECONDS = 5.0  # time limit of a connection to the hub


def check_reachable(source: str, revision: str = "main") -> None:
    """Raise ``ConnectionError`` for a hub name that is neither cached nor reachable, at once."""
    if Path(source).is_dir() or constants.HF_HUB_OFFLINE:
        return
    try:
        if isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str):
            return
    except ValueError:
        return  # not a hub name: the loader names the problem
    if urllib.request.getproxies():
        return  # only the client itself can tell
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"it is neither a folder nor in the hub's cache, and {constants.ENDPOINT} cannot be "
            f"reached ({error})"
        ) from error
