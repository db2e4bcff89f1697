"""The Hugging Face hub: a fast answer to whether it can be used at all, and uploads."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_token, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id

from vlm_grpo.errors import UserError

SECONDS = 5.0  # time limit of a connection to the hub
HEAD_LINES = 24  # of the model card, which a dry run shows
# Errors of the client, of its HTTP library (whose name differs by version), and of uploads.
_HUB_ERRORS: tuple[Any, ...] = (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)


def check_reachable(source: str, revision: str = "main") -> None:
    """Raise ``ConnectionError`` for a hub name that is neither cached nor reachable, at once."""
    if Path(source).is_dir() or constants.HF_HUB_OFFLINE:
        return
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
    """Raise ``ConnectionError`` at once if the hub cannot be reached, unless through a proxy."""
    if urllib.request.getproxies():
        return  # only the client itself can tell
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"{constants.ENDPOINT} cannot be reached ({error})") from error


def check_pushable(name: str) -> None:
    """Check that a model can be pushed as ``name``, before it is exported."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name} is not a name on the hub (OWNER/NAME): {error}") from error
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push needs the hub, and HF_HUB_OFFLINE is set: unset it, or --dry-run")
    if get_token() is None:
        raise UserError(
            "--push needs a token that may write: run hf auth login, or set HF_TOKEN (from "
            "https://huggingface.co/settings/tokens)"
        )
    with _explain_errors(name, "nothing was exported"):
        check_connection()
        HfApi().whoami()


def push(folder: Path, name: str, public: bool) -> str:
    """Upload a folder to a model repository, new if there is none; return its address."""
    remedy = f"the model is in {folder}: upload it with hf upload {name} {folder}"
    with _explain_errors(name, remedy):
        url = HfApi().create_repo(name, private=not public, exist_ok=True)
        HfApi().upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model by vlm-grpo"
        )
    return str(url)


def describe_push(folder: Path, name: str, public: bool) -> Iterator[str]:
    """Yield the lines that say what ``push`` would upload."""
    visibility = "public" if public else "private"
    yield f"would push to {constants.ENDPOINT}/{name}, {visibility} if it is new:"
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in paths]
    width = len(f"{max(sizes):,}")
    for path, size in zip(paths, sizes, strict=True):
        yield f"  {size:>{width},} bytes  {path.relative_to(folder)}"
    yield f"  {sum(sizes):>{width},} bytes in all"
    yield "README.md begins:"
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    yield from (f"  {line}".rstrip() for line in lines[:HEAD_LINES])


@contextmanager
def _explain_errors(name: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except _HUB_ERRORS as error:
        problem = str(error).strip().partition("\n")[0]
        response = error.response if isinstance(error, HfHubHTTPError) else None
        if response is not None and response.status_code in (401, 403):
            problem = f"the hub refuses the token ({problem}): log in with one that may write there"
        raise UserError(f"--push {name}: {problem}; {remedy}") from error
