"""A real file system of a few megabytes, to be filled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted file system in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, leaving: int = 0) -> None:
        """Take all room but ``leaving`` bytes, in whole pages."""
        status = os.statvfs(self.folder)
        self._filler.write_bytes(b"x" * max(0, status.f_bavail * status.f_frsize - leaving))

    def make_room(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[SmallDisk]:
    """Mount a disk of ``size`` bytes on a folder; the test is skipped where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no disk to fill: {error}")
    if done.returncode:
        pytest.skip(f"no disk to fill, mounting needs root: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
