"""The checksums of a checkpoint's files."""

import hashlib
from pathlib import Path
from typing import Any

from vlm_grpo.errors import UserError
from vlm_grpo.utils.jsonl import read_object

MANIFEST = "manifest.json"
Checksums = dict[str, dict[str, Any]]
"""The ``size`` in bytes and the ``sha256`` of each file by name."""


class CorruptCheckpoint(UserError):
    """The error that a checkpoint's file differs from the one that was written."""


def compute_checksum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def verify_checkpoint(checkpoint: Path) -> None:
    """Raise ``CorruptCheckpoint`` for the first file that differs from the manifest."""
    manifest = checkpoint / MANIFEST
    try:
        listed = read_object(manifest)["files"]
        files = {name: (file["size"], file["sha256"]) for name, file in listed.items()}
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{manifest} is missing or cannot be read ({error})") from error
    for name, (expected_size, digest) in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing")
        size = path.stat().st_size
        if size != expected_size:
            raise CorruptCheckpoint(
                f"{path} has {size} bytes, and had {expected_size} when it was written"
            )
        if compute_checksum(path)["sha256"] != digest:
            raise CorruptCheckpoint(f"{path} differs from what was written")
