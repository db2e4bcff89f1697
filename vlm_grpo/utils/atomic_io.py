"""Writing files whole or not at all, and what to say where the disk is full."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlm_grpo.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full file system, a quota that is used up, and a file of the largest size."""


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file aside and rename it into place; where that fails, nothing is left of it."""
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def append_durable(path: Path, content: bytes) -> None:
    """Append to a file and bring it to the disk; where that fails, the file is as it was."""
    with path.open("ab", buffering=0) as file:  # a buffer would be written again on closing
        start = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())  # no checkpoint may outlive the lines before it
        except OSError:
            file.truncate(start)
            raise


@contextmanager
def explain_disk_full(folder: Path) -> Iterator[None]:
    """Say that the disk is full where that is why something could not be written.

    Args:
        folder: what is written to.

    Raises:
        UserError: in place of the error of a full disk.
    """
    try:
        yield
    except Exception as error:  # safetensors has an error of its own, with the number in its text
        number = re.search(r"os error (\d+)", str(error))
        code = error.errno if isinstance(error, OSError) else int(number[1]) if number else None
        if code not in FULL:
            raise
        raise UserError(
            f"the disk that holds {folder} is full ({error}): what was written before is whole; "
            "make room and go on with resume=true"
        ) from error
