"""A fast answer to whether the Hugging Face hub can be used at all, and names of models on it."""

import json
import socket
import urllib.request
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

from vlm_grpo.errors import nearest

SECONDS = 5.0  # time limit of a connection to the hub


@cache
def load_known_models() -> dict[str, Any]:
    """Return well-known models by name, with the public values of their configurations and shapes
    for a plan (written by ``perf/known_models.py``)."""
    return json.loads(files("vlm_grpo").joinpath("model/known_models.json").read_text("utf-8"))


def suggest_model(source: str) -> str:
    """Return a hint at the well-known model whose name is nearest, unless ``source`` is right."""
    known = load_known_models()
    return "" if source in known or Path(source).is_dir() else nearest(source, known)


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
            f"it is neither a folder nor in the hub's cache, and this machine is offline: "
            f"{constants.ENDPOINT} cannot be reached ({error})"
        ) from error
