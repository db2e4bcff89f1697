"""Worker processes: replaced if they end, and ended with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from pebble import ProcessExpired

from vlm_grpo.utils.worker_pool import WorkerPool

CONTEXT = multiprocessing.get_context("spawn")


def initialize(value: str) -> None:
    os.environ["GIVEN"] = value


def get_given() -> tuple[int, str]:
    return os.getpid(), os.environ["GIVEN"]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, CONTEXT, ("test", "setting"), initialize, ["value"])
    yield pool
    pool.close()


def test_a_worker_that_ends_fails_its_call_and_is_replaced(pool):
    first, given = pool.schedule(get_given, ()).result(60)
    assert given == "value"
    with pytest.raises(ProcessExpired) as expired:
        pool.schedule(os._exit, [7]).result(60)
    assert expired.value.exitcode == 7
    second, given = pool.schedule(get_given, ()).result(60)
    assert given == "value"
    assert second not in (first, os.getpid())


def test_a_worker_that_ends_between_two_calls_is_replaced(pool):
    first, _ = pool.schedule(get_given, ()).result(60)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.5)  # the pool looks for ended workers every 0.1 s
    try:
        second, _ = pool.schedule(get_given, ()).result(60)
    except BrokenProcessPool:  # it had not looked yet
        second, _ = pool.schedule(get_given, ()).result(60)
    assert second != first


def test_workers_ignore_the_signals_of_the_terminal_and_end_with_their_parent():
    program = (
        "import multiprocessing, os, signal, time\n"
        "from vlm_grpo.utils.worker_pool import WorkerPool\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    pool = WorkerPool(1, context, ('test', 'setting'))\n"
        "    pid = pool.schedule(os.getpid, ()).result()\n"
        "    for number in (signal.SIGINT, signal.SIGHUP):\n"
        "        os.kill(pid, number)\n"
        "    assert pool.schedule(os.getpid, ()).result() == pid\n"
        "    print(pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with Popen([sys.executable, "-c", program], stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        worker = Path("/proc") / process.stdout.readline().strip()
        assert (worker / "stat").exists()
        process.kill()
    deadline = time.monotonic() + 30
    while worker.exists() and " Z " not in (worker / "stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
