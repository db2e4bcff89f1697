"""A lock on a folder that one process holds until it ends."""

import errno
import fcntl
import getpass
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from vlm_grpo.errors import UserError
from vlm_grpo.utils.atomic_io import create_folder

logger = logging.getLogger(__name__)

# By the folder that this process holds: its state, and the locked file.
_HELD: dict[str, tuple[os.stat_result, BinaryIO]] = {}


def _drop_inherited() -> None:
    """Close the files in a forked process, which would hold the locks as long as it has them."""
    for _, file in _HELD.values():
        file.close()
    _HELD.clear()


os.register_at_fork(after_in_child=_drop_inherited)


def check_lock(folder: Path) -> None:
    """Raise a ``UserError`` if the folder that this process has locked was renamed or removed."""
    held = _HELD.get(os.path.realpath(folder))
    if held and not (folder.exists() and os.path.samestat(folder.stat(), held[0])):
        raise UserError(
            f"{folder} was renamed or removed: this run ends; to continue it, give the folder its "
            "name again, or start the command with the new name=… and resume=true"
        )


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside; the process that holds it may enter again.

    The system frees it when the process ends, however it does. A missing folder is created, and
    removed at the end if nothing was written into it. ``UserError``: another process holds it; the
    message says which one and since when."""
    key = os.path.realpath(folder)
    if key in _HELD:
        yield
        return
    with create_folder(folder), _open_locked(folder) as file:
        try:
            _HELD[key] = folder.stat(), file
            file.write(_describe_process().encode())
            yield
        finally:
            if _HELD.pop(key, None) is not None:  # not in a process that user code has forked
                with suppress(FileNotFoundError):
                    # Not that of another folder, which has the name now.
                    if os.path.samestat((folder / ".lock").stat(), os.fstat(file.fileno())):
                        (folder / ".lock").unlink()


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
                    holder = path.read_text("utf-8", errors="replace") or "another process"
                except FileNotFoundError:  # released just now
                    continue
                raise UserError(
                    f"{folder} is in use by {holder}: wait until that process ends, stop it, or "
                    "start another run with another name=…"
                ) from error
            logger.warning("%s cannot be locked (%s): start no second run there", folder, error)
            return path.open("ab", buffering=0)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                file.truncate(0)  # of a holder that was killed
                return file
        file.close()  # its last holder has removed it meanwhile


def _describe_process() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, a user may have no name
        user = str(os.getuid())
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"process {os.getpid()} on {socket.gethostname()} (user {user}) since {since}"
