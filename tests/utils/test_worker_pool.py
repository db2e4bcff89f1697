"""Worker processes: replaced if they end, and ended with the process that started them."""

import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import Future
from subprocess import PIPE, Popen

import pytest
from processes import is_alive, wait_for

from vlm_grpo.errors import UserError
from vlm_grpo.utils.worker_pool import WorkerEnded, WorkerError, WorkerPool, is_worker


def get_number() -> int:
    assert is_worker()
    return os.getpid()


class Unpicklable(Exception):
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return int, ("no number",)


def raise_unpicklable() -> None:
    raise Unpicklable("no text")


def terminate_fork() -> int:
    pid = os.fork() or time.sleep(60) or os._exit(0)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, "test")
    yield pool
    pool.close()


def test_a_worker_that_ends_fails_its_call_and_is_replaced(pool):
    first = pool.schedule(get_number, ()).result(60)
    with pytest.raises(WorkerEnded) as expired:
        pool.schedule(os._exit, [7]).result(60)
    assert expired.value.exitcode == 7
    second = pool.schedule(get_number, ()).result(60)
    assert second not in (first, os.getpid())
    os.kill(second, signal.SIGKILL)  # between two calls
    third = pool.schedule(get_number, ()).result(60)
    assert third != second
    with pytest.raises(TimeoutError):
        pool.schedule(time.sleep, [60], 0.05).result(60)
    assert not is_worker()


def test_an_argument_that_cannot_be_loaded_fails_its_call_only_and_what_a_call_forks_ends(pool):
    worker = pool.schedule(get_number, ()).result(60)
    with pytest.raises(ValueError, match="no number"):
        pool.schedule(int, [Unpicklable()]).result(60)
    assert pool.schedule(get_number, ()).result(60) == worker
    assert pool.schedule(terminate_fork, ()).result(60) == -signal.SIGTERM  # which workers ignore


def test_a_pool_that_one_of_its_own_threads_collects_is_closed():
    pool = WorkerPool(1, "test")
    assert pool.schedule(int, ()).result(60) == 0
    crew, closed = pool._crew, Future()  # noqa: SLF001
    assert crew is not None

    future = pool.schedule(time.sleep, [0.2])
    # The callback runs in the thread that has awaited the answer.
    future.add_done_callback(lambda _: closed.set_result(crew.close()))
    closed.result(60)
    (thread,) = crew.threads
    thread.join(60)
    assert not thread.is_alive()


def test_what_a_call_raises_has_the_workers_traceback(pool):
    with pytest.raises(ValueError, match="no number") as caught:
        pool.schedule(int, ["no number"]).result(60)
    assert "worker_process.py" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Unpicklable: no text"):
        pool.schedule(raise_unpicklable, ()).result(60)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
        pool.schedule(threading.Lock, ()).result(60)


def test_workers_never_run_the_users_program(pool, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    main = types.ModuleType("__main__")
    main.__file__ = str(program)
    exec("class Answer: pass\ndef score(): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(UserError, match=r"Answer is defined in the program, .* a file of its own"):
        pool.schedule(print, [main.Answer()])
    with pytest.raises(UserError, match="score is defined in the program"):
        pool.schedule(main.score, ())
    pool.close()
    assert pool.schedule(get_number, ()).result(60)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raise SystemExit(3)", "exit code 3; lower rollout.reward_workers (0: none)"),
        ("import time; time.sleep(60)", "no answer after 0.5 s"),
    ],
)
def test_workers_that_do_not_start_are_one_error(end, reason, monkeypatch, tmp_path):
    if "sleep" in end:
        monkeypatch.setattr("vlm_grpo.utils.worker_pool.START_SECONDS", 0.5)
    program, started = tmp_path / "program.py", tmp_path / "started"
    program.write_text(f"print('once', file=open({str(started)!r}, 'a'), flush=True); {end}")
    monkeypatch.setattr("vlm_grpo.utils.worker_process.__file__", str(program))
    pool = WorkerPool(1, "test")
    for _ in range(3):
        with pytest.raises(WorkerError, match=f"did not start: {re.escape(reason)}"):
            pool.schedule(str, ()).result(60)
    assert started.read_text() == "once\n"
    pool.close()


def test_workers_ignore_signals_and_end_with_their_parent_and_with_its_forks_alive():
    program = (
        "import os, signal, time\n"
        "from vlm_grpo.utils.worker_pool import WorkerPool\n"
        "pool = WorkerPool(1, 'test')\n"
        "pid = pool.schedule(os.getpid, ()).result()\n"
        "for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):\n"
        "    os.kill(pid, number)\n"
        "assert pool.schedule(os.getpid, ()).result() == pid\n"
        "pool.schedule(pow, (9, 9 ** 9))\n"  # compiled code, which never ends
        "fork = os.fork() or time.sleep(60) or os._exit(0)\n"
        "print(pid, fork, flush=True)\n"
        "time.sleep(60)\n"
    )
    with Popen([sys.executable, "-c", program], stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        pid, fork = map(int, process.stdout.readline().split())
        assert is_alive(pid)
        process.kill()
        wait_for(lambda: not is_alive(pid))
        os.kill(fork, signal.SIGKILL)
