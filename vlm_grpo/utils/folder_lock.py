"""A lock on a folder that one process holds until it ends, on local and network file systems.

A file ``.lock-N`` in the folder describes the holder, which touches it as a sign of life. If the
holder is gone, the lock is stale and the next process creates ``.lock-N+1``. A holder on the same
machine is gone if its process is; one elsewhere, if it has not touched the file for a while by the
clock of the file system. Neither ``flock``, which some network file systems ignore, nor equal
clocks of several machines are needed.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import random
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vlm_grpo.errors import UserError
from vlm_grpo.utils.atomic_io import create_folder

logger = logging.getLogger(__name__)

BEAT_SECONDS = 10.0  # time between two signs of life
STALE_SECONDS = 120.0
"""Time without a sign of life after which a holder on another machine counts as gone."""
POLL_SECONDS = 1.0  # time between two looks for a sign of life


class FolderLock:
    """A lock that a thread of this process holds; ``is_lost`` once another has taken it over."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.content, self.owner = path, content, _get_owner()
        self.is_lost, self._released = False, threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def release(self) -> None:
        self._released.set()
        with contextlib.suppress(OSError):
            if self._is_ours():
                self.path.unlink()

    def _is_ours(self) -> bool:
        return _read_locks(self.path.parent).get(self.path) == self.content

    def _beat(self) -> None:
        while not self.is_lost and not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a server that does not answer: try again
                if self._is_ours():
                    os.utime(self.path)
                else:
                    self.is_lost = True


_HELD: dict[str, FolderLock] = {}


def check_lock(folder: Path) -> None:
    """Raise a ``UserError`` if another process has taken this one, long suspended, for gone."""
    lock = _HELD.get(os.path.realpath(folder))
    if lock is not None and lock.is_lost:
        raise UserError(
            f"another process has taken over {folder}, because this one gave no sign of life for "
            f"{STALE_SECONDS:.0f} s: this run ends and leaves the folder to the other one"
        )


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside; the thread that holds it may enter again.

    A missing folder is created, and removed at the end if nothing was written into it.
    ``UserError``: another process holds it; the message says which one and since when."""
    key = os.path.realpath(folder)
    if key in _HELD and _HELD[key].owner == _get_owner():
        yield
        return
    with create_folder(folder):
        lock = _HELD[key] = _acquire(folder)
        try:
            yield
        finally:
            del _HELD[key]
            lock.release()


def _get_owner() -> tuple[int, int]:
    """Return this process and thread: a forked process inherits the locks, but holds none."""
    return os.getpid(), threading.get_ident()


def _acquire(folder: Path) -> FolderLock:
    # Of several processes that find the same stale lock, one creates the next file. It then looks
    # again: while it was slow, others may have come, and a file that it has not judged may be
    # theirs. It then gives up its own file and starts again.
    while True:
        stale = {path: text for path, text in _read_locks(folder).items() if _is_stale(path)}
        last = max((int(path.name.rpartition("-")[2]) for path in stale), default=0)
        path, content = folder / f".lock-{last + 1}", _describe_process()
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            continue
        except OSError:  # a full disk
            path.unlink(missing_ok=True)
            raise
        others = {other: text for other, text in _read_locks(folder).items() if other != path}
        if others.items() <= stale.items():
            for other in others:
                other.unlink(missing_ok=True)
            return FolderLock(path, content)
        path.unlink()
        time.sleep(random.uniform(0, 0.1))


def _read_locks(folder: Path) -> dict[Path, bytes]:
    found = {}
    for path in folder.iterdir():
        if re.fullmatch(r"\.lock-\d+", path.name):
            with contextlib.suppress(FileNotFoundError):  # released just now
                found[path] = path.read_bytes()
    return found


def _is_stale(path: Path) -> bool:
    """Return True if the holder is gone, perhaps after a while; ``UserError``: it is alive."""
    first, is_announced = None, False
    while True:
        try:
            # Opened, not only stat: network file systems then ask the server.
            with path.open("rb") as file:
                content, touched = file.read(), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return True
        holder = _parse(content)
        name = "process {pid} on {host} (user {user}) since {since}".format_map(holder)
        runs = _is_running(holder)
        if runs or (first is not None and touched != first):
            raise UserError(
                f"{path.parent} is in use by {name}: wait until that process ends, stop it, or "
                "start another run with another name=…"
            )
        with tempfile.TemporaryFile(dir=path.parent) as file:  # has the file system's time
            os.utime(file.fileno())
            left = STALE_SECONDS - (os.fstat(file.fileno()).st_mtime - touched)
        if runs is False or left <= 0:
            return True
        if first is not None and not is_announced:
            logger.warning("%s is locked by %s: waiting up to %.0f s", path.parent, name, left)
            is_announced = True
        first = touched
        time.sleep(POLL_SECONDS)


def _describe_process() -> bytes:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, a user may have no name
        user = str(os.getuid())
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "user": user,
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "machine": _name_machine(),
        "started": _read_start(os.getpid()),
        "id": uuid.uuid4().hex,
    }
    return json.dumps(holder).encode()


def _parse(content: bytes) -> dict[str, Any]:
    names = ("pid", "host", "user", "since", "machine", "started")
    unknown: dict[str, Any] = dict.fromkeys(names, "unknown")
    with contextlib.suppress(ValueError, TypeError):  # it was killed while writing it
        return unknown | json.loads(content)
    return unknown


def _is_running(holder: dict[str, Any]) -> bool | None:
    """Return whether the holder's process runs; None if that cannot be seen from here."""
    pid, machine = holder["pid"], _name_machine()
    if machine is None or holder["machine"] != machine or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, who may hide its start
        return None
    return _read_start(pid) == holder["started"]


def _name_machine() -> str | None:
    """Return a name of the space in which this process has its number; None if unknown.

    The host's name is not enough: containers may share it, but not their processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _read_start(pid: int) -> int | None:
    """Return the start of a process in clock ticks since that of the machine; None if it ended.

    Another process that gets the same number has another start.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # its name, before, may contain spaces
    return None if state in "ZX" else int(fields[18])
