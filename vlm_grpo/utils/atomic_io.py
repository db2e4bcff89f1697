"""Atomic writes, durable appends, and the error message for a full disk."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlm_grpo.errors import UserError

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full file system, an exhausted quota, and a file of the maximum size."""


def write_atomic(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it to ``path``; an ``OSError`` leaves the old file."""
    tmp_path = path.with_name(f".{secrets.token_hex(8)}.tmp")  # another process may write too
    try:
        tmp_path.write_bytes(content)
        tmp_path.replace(path)
    except BaseException as error:
        tmp_path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # name the file, not the temporary one
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def append_durable(path: Path, content: bytes) -> None:
    """Append to a file and sync it to disk; an ``OSError`` leaves the file unchanged."""
    with path.open("ab", buffering=0) as file:  # a buffer would be flushed again on closing
        start = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())  # a later checkpoint must not survive without these lines
        except OSError:
            file.truncate(start)
            raise


@contextmanager
def create_folder(folder: Path) -> Iterator[None]:
    """Create a folder with its parents; at the end, remove those created that are still empty."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in created:
            with suppress(OSError):  # not empty
                path.rmdir()


@contextmanager
def create_whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` if the block ends without an error.

    ``UserError``: it is a file, is not empty, or cannot be created.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: give another one")
    tmp_dir = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(tmp_dir, ignore_errors=True)  # left by an interrupted process
    with create_folder(folder.parent):
        try:
            tmp_dir.mkdir()
        except OSError as error:
            raise UserError(f"{folder} cannot be created: {error.strerror}") from error
        try:
            yield tmp_dir
            tmp_dir.rename(folder)
        finally:
            shutil.rmtree(tmp_dir, ignore_errors=True)


def share_weights(folder: Path) -> None:
    """Let whoever may read a folder read its weights, which safetensors 0.8 writes for their owner
    alone."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


@contextmanager
def explain_disk_full(folder: Path) -> Iterator[None]:
    """Replace the error of a full disk by a ``UserError`` with the folder and the remedy."""
    try:
        yield
    except UserError:  # of a part that has explained it
        raise
    except Exception as error:  # the errors of safetensors have the number only in their text
        number = re.search(r"os error (\d+)", str(error))
        code = error.errno if isinstance(error, OSError) else int(number[1]) if number else None
        if code not in DISK_FULL_ERRORS:
            raise
        raise UserError(
            f"the disk of {folder} is full ({error}): earlier files are intact; "
            "make room and continue with resume=true"
        ) from error
