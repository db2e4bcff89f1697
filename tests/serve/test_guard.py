"""The process between a run and its server, which ends the server with the run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import is_alive, wait_for

from vlm_grpo.serve import guard

TREE = "sleep 1000 & echo $! > child; echo $$ > parent; {} wait"
"""A command with a child; both write their numbers."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Return a function that runs a shell command under the guard, which stops it in 0.3 s."""
    program = tmp_path / "guard.py"
    text = Path(guard.__file__).read_text().replace("STOP_SECONDS = 10.0", "STOP_SECONDS = 0.3")
    assert "STOP_SECONDS = 0.3" in text
    program.write_text(text)
    started = []

    def run(command: str) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, "-IS", str(program), "sh", "-c", command]
        started.append(subprocess.Popen(arguments, stdin=subprocess.PIPE, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.stdin.close()
        process.wait(30)


def read_numbers(folder: Path) -> list[int]:
    files = [folder / "parent", folder / "child"]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize(("command", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_exit_status_of_the_command(start: Any, command: str, status: int) -> None:
    assert start(command).wait(30) == status


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM;"])
def test_the_end_of_the_pipe_ends_the_whole_tree(start: Any, tmp_path: Path, stubborn: str) -> None:
    """Also one that ignores SIGTERM, as do its children, which are killed then."""
    process = start(stubborn + TREE.format(stubborn))
    numbers = read_numbers(tmp_path)
    assert all(is_alive(number) for number in numbers)
    process.stdin.close()
    # 128 + 15 (SIGTERM), or + 9 (SIGKILL).
    assert process.wait(30) == (137 if stubborn else 143)
    wait_for(lambda: not any(is_alive(number) for number in numbers))


def test_children_of_a_command_that_has_ended_are_killed(start: Any, tmp_path: Path) -> None:
    process = start("sleep 1000 & echo $! > child; echo $$ > parent; exit 1")
    assert process.wait(30) == 1
    wait_for(lambda: not any(is_alive(number) for number in read_numbers(tmp_path)))


def test_signals_of_the_terminal_are_ignored(start: Any, tmp_path: Path) -> None:
    """The run decides when its server ends; the server itself reacts to signals as always."""
    process = start(TREE.format(""))
    parent, _ = read_numbers(tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.1)
    assert process.poll() is None
    assert is_alive(parent)
    status = Path(f"/proc/{parent}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert not ignored >> (number - 1) & 1, number
