"""Processes and ports that a test looks for after something has ended, and small disks to fill."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, leaving: int = 0) -> None:
        """Fill the disk up to ``leaving`` free bytes, rounded to pages."""
        status = os.statvfs(self.folder)
        self._filler.write_bytes(b"x" * max(0, status.f_bavail * status.f_frsize - leaving))

    def make_room(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk]:
    """Mount a disk of ``size`` bytes at ``folder``; skip the test where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount a small disk: {error}")
    if result.returncode:
        pytest.skip(f"cannot mount a small disk, which needs root: {result.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for yet (a zombie) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)
