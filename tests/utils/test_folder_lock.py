"""The lock on a folder, between real processes."""

import errno
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import run_python
from processes import small_disk

from vlm_grpo.errors import UserError
from vlm_grpo.utils.folder_lock import check_lock, lock_folder

HOLD = """
import os, sys, time
from pathlib import Path
from vlm_grpo.utils.folder_lock import lock_folder
folder = Path(sys.argv[1])
with lock_folder(folder):
    (folder / ".lock").open().close()  # a record lock would be gone
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.close(1)
        os.write(tell, b"x")
        time.sleep(60)
    os.read(ready, 1)
    print("held", flush=True)
    input()
    os._exit(0)  # before the child
"""
RACE = """
import fcntl, os, random, sys, time
from pathlib import Path
from vlm_grpo.errors import UserError
from vlm_grpo.utils.folder_lock import lock_folder
lock = fcntl.flock
def lock_slowly(*arguments):  # after the file is opened, which its holder may remove
    time.sleep(random.uniform(0, 0.02))
    lock(*arguments)
fcntl.flock = lock_slowly
folder, start = Path(sys.argv[1]), time.monotonic() + 0.1
inside = folder / "inside"
for _ in range(8):
    if os.fork() == 0:
        random.seed()
        while time.monotonic() < start:
            pass
        entered = 0
        for _ in range(30):
            try:
                with lock_folder(folder):
                    inside.touch(exist_ok=False)  # fails if another process is inside
                    time.sleep(0.003)
                    entered += 1
                    inside.unlink()
            except UserError:
                pass
        os.write(1, f"{entered}\\n".encode())
        os._exit(0)
for _ in range(8):
    assert os.wait()[1] == 0
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """A function that starts a process, and a fork of it, that hold ``tmp_path / "run"``."""
    processes, pipe = [], subprocess.PIPE

    def hold() -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-c", HOLD, str(tmp_path / "run")]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_second_process_is_told_who_holds_the_folder_until_that_ends(tmp_path, hold):
    process = hold()
    with pytest.raises(UserError) as caught, lock_folder(tmp_path / "run"):
        pass
    expected = (
        rf"{re.escape(str(tmp_path / 'run'))} is in use by process {process.pid} on \S+ "
        r"\(user \S+\) since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: wait until that process ends, "
        r"stop it, or start another run with another name=…"
    )
    assert re.fullmatch(expected, str(caught.value))
    process.communicate("\n")
    assert process.returncode == 0
    with lock_folder(tmp_path / "run"):  # its fork does not keep it
        pass


def test_a_holder_that_is_killed_or_a_zombie_frees_the_folder_at_once(tmp_path, hold):
    process = hold()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it remains as a zombie
    with lock_folder(tmp_path / "run"):
        text = (tmp_path / "run/.lock").read_text()
        assert text.startswith(f"process {os.getpid()} on ")
        assert text.count("process") == 1  # what the other one wrote is gone
    assert not (tmp_path / "run/.lock").exists()


def test_of_many_processes_at_once_one_at_a_time_gets_in(tmp_path):
    entered = run_python("-W", "ignore", "-c", RACE, tmp_path)
    assert sum(map(int, entered.split())) > 0
    assert list(tmp_path.iterdir()) == []


def test_folders_created_for_a_run_that_wrote_nothing_are_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "runs" / "one"):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    with lock_folder(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "one" / "config.yaml").touch()
    assert (tmp_path / "runs" / "one" / "config.yaml").exists()


def test_a_full_disk_leaves_no_lock(tmp_path):
    with small_disk(tmp_path / "disk", 2**20) as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left"), lock_folder(disk.folder):
            pass
        assert not (disk.folder / ".lock").exists()
        disk.make_room()
        with lock_folder(disk.folder):
            pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), lock_folder(tmp_path / "run"):
        assert "cannot be locked" in caplog.text
        assert "start no second run there" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_holder_does_not_write_into_another_folder_of_the_same_name(tmp_path):
    folder = tmp_path / "run"
    check_lock(folder)  # nothing is held
    with lock_folder(folder):
        with lock_folder(folder):  # again
            check_lock(folder)
        assert (folder / ".lock").exists()
        folder.rename(tmp_path / "renamed")
        for _ in range(2):  # missing, and created again by a write
            with pytest.raises(UserError, match=r"run was renamed or removed: .* new name="):
                check_lock(folder)
            folder.mkdir(exist_ok=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_only_the_holder_removes_its_lock_and_never_that_of_another_run(tmp_path, hold):
    folder = tmp_path / "run"
    with lock_folder(folder):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            assert (folder / ".lock").exists()
    if pid == 0:  # it has left the block, as after an error of user code
        os._exit(0)
    assert not folder.exists()
    with lock_folder(folder):
        folder.rename(tmp_path / "renamed")
        hold()
    assert (folder / ".lock").exists()
