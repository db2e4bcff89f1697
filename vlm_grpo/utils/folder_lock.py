"""A lock on a folder that one process holds until it ends."""

from __future__ import annotations

import errno
import fcntl
import getpass
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from vlm_grpo.errors import UserError
from vlm_grpo.utils.atomic_io import create_folder

logger = logging.getLogger(__name__)

# Process, thread and description of each holder, the state of the folder, and its locked file.
_HELD: dict[str, tuple[int, int, str, os.stat_result, BinaryIO]] = {}


def _close_inherited() -> None:
    for *_, file in _HELD.values():
        file.close()


# A forked process, which may outlive this one, would hold its locks as long as it has their files.
os.register_at_fork(after_in_child=_close_inherited)


def check_lock(folder: Path) -> None:
    """Raise a ``UserError`` if this process must not write to the folder that it has locked: it was
    renamed or removed, or user code has forked this process."""
    if (held := _HELD.get(os.path.realpath(folder))) is None:
        return
    if held[0] != os.getpid():
        raise UserError(f"this process was forked by user code from the run in {folder}, and ends")
    if not folder.exists() or not os.path.samestat(folder.stat(), held[3]):
        raise UserError(
            f"{folder} was renamed or removed: this run ends; to continue it, give the folder its "
            "name again, or start the command with the new name=… and resume=true"
        )


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside; the thread that holds it may enter again.

    The system frees it when the process ends, however it does. A missing folder is created, and
    removed at the end if nothing was written into it. ``UserError``: another process or thread
    holds it; the message says which one and since when."""
    key, process, thread = os.path.realpath(folder), os.getpid(), threading.get_ident()
    owner, thread_inside, name, *_ = _HELD.get(key, (None, None, ""))
    if owner == process:  # a forked process inherits the table, but no locks
        if thread_inside != thread:
            raise _refuse(folder, name)
        yield
        return
    with create_folder(folder), _open_locked(folder) as file:
        try:
            name = _describe_process()
            file.write(name.encode())
            _HELD[key] = process, thread, name, folder.stat(), file
            yield
        finally:
            _HELD.pop(key, None)
            if os.getpid() == process:  # not in a process that user code has forked
                _remove_own(folder / ".lock", file)


def _open_locked(folder: Path) -> BinaryIO:
    path = folder / ".lock"
    while True:
        file = path.open("ab", buffering=0)
        try:
            # Not lockf: its lock is lost when this process closes the file elsewhere.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                try:
                    raise _refuse(folder, path.read_text("utf-8", errors="replace")) from error
                except FileNotFoundError:  # released just now
                    continue
            logger.warning("%s cannot be locked (%s): start no second run there", folder, error)
            return path.open("ab", buffering=0)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                file.truncate(0)  # of a holder that was killed
                return file
        file.close()  # its last holder has removed it meanwhile


def _remove_own(path: Path, file: BinaryIO) -> None:
    """Remove the file of a lock, unless it is that of another folder, which has the name now."""
    with suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            path.unlink()


def _refuse(folder: Path, holder: str) -> UserError:
    return UserError(
        f"{folder} is in use by {holder or 'another process'}: wait until that process ends, stop "
        "it, or start another run with another name=…"
    )


def _describe_process() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, a user may have no name
        user = str(os.getuid())
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"process {os.getpid()} on {socket.gethostname()} (user {user}) since {since}"
