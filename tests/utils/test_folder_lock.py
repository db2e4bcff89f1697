"""The lock on a folder, between real processes, and as seen from another machine."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import small_disk, wait_for

from vlm_grpo.errors import UserError
from vlm_grpo.utils import folder_lock
from vlm_grpo.utils.folder_lock import check_lock, lock_folder

HOLD = """
import sys, time
from pathlib import Path
from vlm_grpo.utils.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
RACE = """
import os, random, sys, time
from pathlib import Path
from vlm_grpo.errors import UserError
from vlm_grpo.utils import folder_lock
from vlm_grpo.utils.folder_lock import lock_folder
describe = folder_lock._describe_process
def describe_slowly():  # between the look at other locks and the creation of a new one
    time.sleep(random.uniform(0, 0.02))
    return describe()
folder_lock._describe_process = describe_slowly
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
    """A function that starts a process that holds the lock of ``tmp_path / "run"``."""
    processes = []

    def hold() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def list_locks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".lock-*"))


def test_a_second_process_is_told_who_holds_the_folder_and_since_when(tmp_path, hold):
    process = hold()
    with pytest.raises(UserError) as caught, lock_folder(tmp_path / "run"):
        pass
    expected = (
        rf"{re.escape(str(tmp_path / 'run'))} is in use by process {process.pid} on \S+ "
        r"\(user \S+\) since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: wait until that process ends, "
        r"stop it, or start another run with another name=…"
    )
    assert re.fullmatch(expected, str(caught.value))
    assert list_locks(tmp_path / "run") == [".lock-1"]


def test_a_holder_that_is_killed_or_a_zombie_frees_the_folder_at_once(tmp_path, hold):
    process = hold()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it remains as a zombie
    started = time.monotonic()
    with lock_folder(tmp_path / "run"):
        assert list_locks(tmp_path / "run") == [".lock-2"]
    assert time.monotonic() - started < 5  # far below STALE_SECONDS
    assert list_locks(tmp_path / "run") == []


def test_another_process_with_the_number_of_a_dead_holder_does_not_hold_the_folder(tmp_path):
    with lock_folder(tmp_path):
        holder = json.loads((tmp_path / ".lock-1").read_text())
    (tmp_path / ".lock-7").write_text(json.dumps({**holder, "started": holder["started"] - 1}))
    with lock_folder(tmp_path):
        assert list_locks(tmp_path) == [".lock-8"]


@pytest.mark.parametrize("stale", [False, True], ids=["free", "stale"])
def test_of_many_processes_at_once_one_at_a_time_gets_in(tmp_path, stale):
    if stale:
        with lock_folder(tmp_path):
            holder = json.loads((tmp_path / ".lock-1").read_text())
        (tmp_path / ".lock-1").write_text(json.dumps({**holder, "started": 0}))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RACE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sum(map(int, done.stdout.split())) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_thread_that_holds_a_folder_enters_again_and_others_do_not(tmp_path):
    def enter() -> None:
        with lock_folder(tmp_path):
            assert list_locks(tmp_path) == [".lock-1"]

    with lock_folder(tmp_path), ThreadPoolExecutor() as pool:
        enter()
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            pool.submit(enter).result()
    assert list_locks(tmp_path) == []


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
        assert list_locks(disk.folder) == []
        disk.make_room()
        with lock_folder(disk.folder):
            assert list_locks(disk.folder) == [".lock-1"]


# Holders on another machine.


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a process on another machine, of which a sign of life is expected every 0.1 s."""
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(folder_lock, "STALE_SECONDS", 0.5)
    holder = {"pid": os.getpid(), "host": "gpu7", "user": "eve", "machine": "another", "started": 1}
    path = tmp_path / ".lock-1"
    path.write_text(json.dumps({**holder, "since": "2026-01-01 00:00:00 UTC"}))
    return path


@pytest.mark.parametrize("content", [None, "", '{"pid": 3', "[]"])
def test_a_lock_without_a_sign_of_life_is_taken_after_a_while(elsewhere, content, caplog):
    if content is not None:  # its process was killed while writing it
        elsewhere.write_text(content)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), lock_folder(elsewhere.parent):
        assert list_locks(elsewhere.parent) == [".lock-2"]
    assert time.monotonic() - started >= 0.4  # STALE_SECONDS, less the time before the start
    holder = "process 3 on gpu7" if content is None else "process unknown on unknown"
    assert f"is locked by {holder}".replace("3", str(os.getpid())) in caplog.text


def test_a_lock_that_has_been_silent_for_long_is_taken_without_waiting(elsewhere, monkeypatch):
    monkeypatch.setattr(folder_lock, "POLL_SECONDS", 1000)
    os.utime(elsewhere, (1, 1))
    with lock_folder(elsewhere.parent):
        pass


def test_a_sign_of_life_from_another_machine_refuses_the_folder(elsewhere, monkeypatch):
    monkeypatch.setattr(folder_lock, "STALE_SECONDS", 60)
    timer = threading.Timer(0.2, os.utime, [elsewhere])
    timer.start()
    expected = r"in use by process \d+ on gpu7 \(user eve\) since 2026-01-01 00:00:00 UTC"
    with pytest.raises(UserError, match=expected), lock_folder(elsewhere.parent):
        pass
    timer.join()
    assert list_locks(elsewhere.parent) == [".lock-1"]


def test_a_holder_gives_signs_of_life(elsewhere):
    elsewhere.unlink()
    with lock_folder(elsewhere.parent):
        os.utime(elsewhere, (1, 1))
        wait_for(lambda: elsewhere.stat().st_mtime > 1)
        check_lock(elsewhere.parent)


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_holder_that_was_taken_for_dead_learns_it(elsewhere, change):
    elsewhere.unlink()
    check_lock(elsewhere.parent)  # nothing is held
    with lock_folder(elsewhere.parent):
        elsewhere.unlink()
        if change == "replaced":
            elsewhere.write_text("{}")
        with pytest.raises(UserError, match=r"another process has taken over .* no sign of life"):
            wait_for(lambda: check_lock(elsewhere.parent))
    assert elsewhere.exists() == (change == "replaced")  # not removed: it belongs to the other
