"""Server processes that a run starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import read_calls, write_python
from processes import is_alive, is_listening, wait_for
from transfer_server import run_transfer_server

from vlm_grpo.errors import UserError
from vlm_grpo.serve import guard
from vlm_grpo.serve.client import VllmClient
from vlm_grpo.serve.process import Server, ServerProcess, find_free_port
from vlm_grpo.utils.http_json import ServiceError


@pytest.fixture
def fast_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers 0.3 s to end by themselves."""
    program = tmp_path / "guard.py"
    text = Path(guard.__file__).read_text()
    program.write_text(text.replace("STOP_SECONDS = 10.0", "STOP_SECONDS = 0.3"))
    monkeypatch.setattr(guard, "__file__", str(program))


def build(folder: Path, model: Path, **plan: object) -> tuple[ServerProcess, int]:
    """Return a process that is not started, and the port of its server."""
    port, python = find_free_port(), write_python(folder / "fake", **plan)
    command = [str(python), "serve", str(model), "--host=127.0.0.1", f"--port={port}"]
    return ServerProcess(command, {"OWN": "1"}, folder / "logs/vllm.log"), port


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.usefixtures("fast_guard")
def test_a_server_is_stopped_with_its_children(
    tmp_path: Path, model_folder: Path, stubborn: bool
) -> None:
    process, port = build(tmp_path, model_folder, has_child=True, ignores_sigterm=stubborn)
    assert not process.is_running
    process.start()
    wait_for(lambda: is_listening(port))
    assert process.is_running
    numbers = [read_calls(tmp_path / "fake")[0]["pid"], int((tmp_path / "fake/child").read_text())]
    assert all(is_alive(number) for number in numbers)
    process.stop()
    assert not process.is_running
    wait_for(lambda: not any(is_alive(number) for number in numbers))
    wait_for(lambda: not is_listening(port))
    process.stop()  # again: nothing happens
    process.start()  # at the same port
    wait_for(lambda: is_listening(port))
    process.stop()


def test_the_log_has_every_start(tmp_path: Path, model_folder: Path) -> None:
    process, _ = build(tmp_path, model_folder, starts={"*": "exit"})
    for _ in range(2):
        process.start()
        wait_for(lambda: not process.is_running)
    process.stop()
    text = process.log.read_text()
    assert text.count(f"$ {tmp_path}/fake/python serve {model_folder}") == 2
    assert text.count("ValueError: No available memory for the cache blocks.") == 2
    assert process.read_last_lines(1) == "ValueError: No available memory for the cache blocks."
    assert process.describe_log() == f"its log {process.log} ends with:\n" + text.rstrip("\n")


def test_the_end_of_a_long_log_is_quoted(tmp_path: Path) -> None:
    process = ServerProcess(["unused"], {}, tmp_path / "log")
    process.log.write_text("".join(f"line {number}\n" for number in range(5000)))
    expected = [f"line {number}" for number in range(4988, 5000)]
    assert process.describe_log().splitlines()[1:] == expected


@pytest.mark.parametrize("name", ["missing/python", "folder", "text"])
def test_a_python_that_cannot_be_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("")  # nobody may execute it
    process = ServerProcess([str(tmp_path / name)], {}, tmp_path / "log")
    with pytest.raises(UserError, match=rf"{name}.*rollout\.vllm\.python"):
        process.start()
    assert not (tmp_path / "log").exists()


def test_two_threads_may_stop_a_server(tmp_path: Path, model_folder: Path) -> None:
    """The run's end and a failed request can meet."""
    process, _ = build(tmp_path, model_folder)
    process.start()
    errors: list[BaseException] = []

    def stop() -> None:
        try:
            process.stop()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not process.is_running


def test_a_closed_process_cannot_be_started(tmp_path: Path, model_folder: Path) -> None:
    """A restart by the thread that samples must not outlive the end of the run."""
    process, _ = build(tmp_path, model_folder)
    process.close()
    with pytest.raises(UserError, match="the run has ended"):
        process.start()
    assert read_calls(tmp_path / "fake") == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_with_the_process_that_started_it(
    tmp_path: Path, model_folder: Path, number: signal.Signals
) -> None:
    """However that ends, the server, its children and its port are gone."""
    process, port = build(tmp_path, model_folder, has_child=True)
    code = (
        # A job in the background of a shell ignores SIGINT, and so would all that it starts.
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from pathlib import Path; from vlm_grpo.serve.process import ServerProcess;"
        f"ServerProcess({process.command!r}, {{}}, Path({str(process.log)!r})).start();"
        "time.sleep(1000)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: is_listening(port))
        pids = [read_calls(tmp_path / "fake")[0]["pid"], int((tmp_path / "fake/child").read_text())]
        os.killpg(starter.pid, number)
        starter.wait(30)
        wait_for(lambda: not any(is_alive(pid) for pid in pids))
        wait_for(lambda: not is_listening(port))
    finally:
        starter.kill()
        starter.wait()


RESUME = ["/reset_encoder_cache", "/reset_prefix_cache", "/update_weight_version", "/resume"]
FREED = {
    0: (["/pause?mode=wait", "/release_kv_cache_memory"], []),
    1: (["/sleep?level=1&mode=wait"], ["/wake_up?tags=weights"]),
    2: (["/sleep?level=2&mode=wait"], ["/wake_up?tags=weights"]),
}
"""For each level the requests that free memory, and those that make room for weights."""


@pytest.mark.parametrize("level", FREED)
def test_memory_is_freed_and_taken_in_the_order_of_what_comes(level: int) -> None:
    free, make_room = FREED[level]
    with run_transfer_server() as fake:
        server = Server(VllmClient(fake.url, 10), sleep_level=level, version=4)
        server.rest()
        server.rest()
        assert fake.calls == free, "once"
        assert server.version is None, "the next weights are loaded whatever their version is"
        fake.calls.clear()
        server.open()
        fake.calls.append("weights")
        server.resume(5, "weights/run/5")
        assert fake.calls == [*make_room, "weights", "/wake_up?tags=kv_cache", *RESUME]
        assert (server.version, server.is_asleep) == (5, False)


def test_a_server_that_does_not_rest_is_paused_while_weights_are_loaded() -> None:
    with run_transfer_server() as fake:
        server = Server(VllmClient(fake.url, 10))
        server.rest()
        assert fake.calls == []
        server.open()
        server.resume(1, "weights/run/1")
        assert fake.calls == ["/pause?mode=wait", *RESUME]


def test_a_server_that_fails_is_not_asleep_when_it_was_started_again() -> None:
    with run_transfer_server() as fake:
        server: Any = Server(VllmClient(fake.url, 10), sleep_level=2, version=4)
        server.rest()
        fake.fails.add("/wake_up?tags=weights")
        with pytest.raises(ServiceError) as failure:
            server.open()
        server.note(str(failure.value))
        assert "out of memory" in server.problem
        server.open()
        assert fake.calls[-1] == "/pause?mode=wait"
