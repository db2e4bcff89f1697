"""Calls in processes that are forked from one that has imported the library, which takes eight
seconds in a new interpreter."""

import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["vlm_grpo.training.trainer", "vlm_grpo.cli.app"])

TIMEOUT = 240
"""Seconds after which ranks count as hanging: ten times what they need on a busy machine."""


def leave_writes_to_the_system() -> None:
    """Do not wait for the disk, as a small run does twenty times: tests end processes, whose writes
    are kept, and never the machine."""
    os.fsync = lambda fd: None


def start_server() -> None:
    """Start the process that is forked, before anything else starts one without the imports."""
    forkserver.ensure_running()


def start(output: Path, function: Callable, *arguments: Any, **environment: str) -> BaseProcess:
    """Start a call in a process that has these environment variables, and prints to ``output``."""
    process = SERVER.Process(target=_call, args=(output, environment, function, arguments))
    process.start()
    return process


def run_program(path: Path, *arguments: str) -> None:
    """Run a Python file as the main program of this process."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def run_alone(words: list[str], folder: str, again: bool) -> None:
    """Run a command in a folder, in a group of processes of its own, and without root's right to
    read every file; ``again``: in a new interpreter."""
    os.setsid()
    os.chdir(folder)
    none = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), none)
    tempfile.tempdir = None  # TMPDIR is read again
    if again:
        os.execv(sys.executable, [sys.executable, "-m", "vlm_grpo.cli", *words])
    import_module("vlm_grpo.cli").main(words)


def _call(output: Path, environment: dict[str, str], function: Callable, arguments: Any) -> None:
    # Also where nohup, or a shell in the background, has started the tests.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_writes_to_the_system()
    gc.freeze()  # collections would visit, and so copy, every object of the server
    os.environ |= environment
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    function(*arguments)


def run_ranks(output: Path, count: int, function: Callable, *arguments: Any) -> None:
    """Run a call in every process of a group on CPUs, as launchers start them; each must end in
    time, with exit status 0."""
    environment = {"ACCELERATE_USE_CPU": "true"}
    if count > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            environment["MASTER_PORT"] = str(free.getsockname()[1])
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
        environment |= {"MASTER_ADDR": "localhost", **sizes}
    ranks = []
    for rank in range(count):
        own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) if count > 1 else {}
        ranks.append(start(output, function, *arguments, **environment, **own))
    try:
        for process in ranks:
            process.join(TIMEOUT)
        found = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert found == [0] * count, f"exit statuses {found}\n{output.read_text()[-5000:]}"
