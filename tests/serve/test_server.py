"""A vLLM server: its HTTP interface, its process, the watch over the parent, and its memory."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import pytest
from accelerate.utils.other import get_free_port
from fake_vllm import read_calls, run_fake, write_python
from processes import is_alive, is_listening, wait_for
from transfer_server import run_transfer_server

from vlm_grpo.errors import UserError
from vlm_grpo.serve import parent_watch
from vlm_grpo.serve.server import Server, ServerProcess, WeightLabel


def test_when_a_server_is_ready_and_whether_it_fits_a_run(tmp_path, model_folder):
    for plan, message in (
        ({"version": "0.31.2"}, "runs vLLM 0.31.2: install 0.32 or later"),
        ({"served": "Qwen2.5-VL"}, "serves Qwen2.5-VL: start it by vlm-grpo serve"),
        ({"missing": ["/weight_info"]}, "/weight_info: status 404 .*: start it by vlm-grpo serve"),
        ({"missing": ["/inference/v1/generate"]}, "generate: status 404 .*: start it by"),
        ({"missing": ["/version"]}, "/version: status 404 .*: start it by"),
        ({"faults": {"/version": {"*": '"ok"'}}}, "/version: .*: start it by"),
        ({"faults": {"/version": {"*": "400"}}}, "/version: status 400 .*: start it by"),
        ({"faults": {"/v1/models": {"*": "[]"}}}, "/v1/models: .*: start it by"),
        *(({"version": v}, None) for v in ("0.32.0", "0.100.0.dev3+cpu", "1.0", "0.32")),
    ):
        expected = pytest.raises(UserError, match=message) if message else nullcontext()
        with run_fake(tmp_path / "fake", model_folder, **plan) as url, expected as caught:
            server = Server(url, 5)
            assert server.is_ready()
            server.check()
        assert caught is None or url in str(caught.value)

    assert not Server(f"http://127.0.0.1:{get_free_port()}", 5).is_ready()
    faults = {"1": "503", "2": "500", "3": "401"}
    with run_fake(tmp_path / "other", model_folder, faults={"/v1/models": faults}) as url:
        server = Server(url, 5)
        assert [server.is_ready() for _ in range(4)] == [False, False, True, True]


def test_a_weight_label_tells_the_versions_of_its_own_run():
    label = WeightLabel("weights", "ab12")
    assert label.read(label.write(7)) == 7
    for other in ("default", "weights/cd34/7", "adapters/ab12/7", "ab12/7", "", "weights/ab12/x"):
        assert label.read(other) == -1, other
    label.check("weights/cd34/7")
    adapters = WeightLabel("adapters", "ab12")
    adapters.check("default")
    adapters.check("adapters/cd34/2")
    with pytest.raises(UserError, match="were replaced by those of a run that trains full weights"):
        adapters.check("weights/cd34/7")


RESUME = ["/reset_encoder_cache", "/reset_prefix_cache", "/update_weight_version", "/resume"]
FREED = {
    None: ([], ["/pause?mode=wait"]),  # nothing is freed
    0: (["/pause?mode=wait", "/release_kv_cache_memory"], []),
    1: (["/sleep?level=1&mode=wait"], ["/wake_up?tags=weights"]),
    2: (["/sleep?level=2&mode=wait"], ["/wake_up?tags=weights"]),
}
"""For each level the requests that free memory, and those that make room for weights."""


@pytest.mark.parametrize("level", FREED)
def test_memory_is_freed_and_taken_in_the_order_of_what_comes(level):
    free, make_room = FREED[level]
    with run_transfer_server() as fake:
        server = Server(fake.url, 10, sleep_level=level)
        server.version = 4
        server.rest()
        server.rest()
        assert fake.calls == free, "once"
        if level is not None:
            assert server.version is None, "the next weights are loaded whatever their version is"
        fake.calls.clear()
        server.open()
        fake.calls.append("weights")
        server.resume(5, "weights/run/5")
        keys = [] if level is None else ["/wake_up?tags=kv_cache"]
        assert fake.calls == [*make_room, "weights", *keys, *RESUME]
        assert (server.version, server.is_asleep) == (5, False)


@pytest.fixture
def watch_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The watch, which gives servers 0.3 s to end by themselves."""
    program = tmp_path / "parent_watch.py"
    text = Path(parent_watch.__file__).read_text()
    assert text.count("STOP_SECONDS = 10.0") == 1
    program.write_text(text.replace("STOP_SECONDS = 10.0", "STOP_SECONDS = 0.3"))
    monkeypatch.setattr(parent_watch, "__file__", str(program))
    return program


def build(folder: Path, model: Path, **plan: object) -> tuple[ServerProcess, int]:
    """Return a process that is not started, and the port of its server."""
    port, python = get_free_port(), write_python(folder / "fake", **plan)
    command = [str(python), "serve", str(model), "--host=127.0.0.1", f"--port={port}"]
    return ServerProcess(command, {"OWN": "1"}, folder / "logs/vllm.log"), port


def find_pids(folder: Path) -> list[int]:
    return [read_calls(folder / "fake")[0]["pid"], int((folder / "fake/child").read_text())]


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.usefixtures("watch_program")
def test_a_server_is_stopped_with_its_children(tmp_path, model_folder, stubborn):
    process, port = build(tmp_path, model_folder, has_child=True, ignores_sigterm=stubborn)
    assert not process.is_running
    process.start()
    wait_for(lambda: is_listening(port))
    assert process.is_running
    pids = find_pids(tmp_path)
    assert all(map(is_alive, pids))
    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(process.stop)
    assert not process.is_running
    wait_for(lambda: not any(map(is_alive, pids)))
    wait_for(lambda: not is_listening(port))
    process.start()  # at the same port
    wait_for(lambda: is_listening(port))
    process.close()
    calls = read_calls(tmp_path / "fake")
    with pytest.raises(UserError, match="the run has ended"):
        process.start()  # such as by the thread that samples
    assert read_calls(tmp_path / "fake") == calls


def test_the_log_has_every_start(tmp_path, model_folder):
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
    process.log.write_text("".join(f"line {number}\n" for number in range(5000)))
    expected = [f"line {number}" for number in range(4988, 5000)]
    assert process.describe_log().splitlines()[1:] == expected


def test_a_python_that_cannot_be_run(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("")  # nobody may execute it
    for name in ("missing/python", "folder", "text"):
        process = ServerProcess([str(tmp_path / name)], {}, tmp_path / "log")
        with pytest.raises(UserError, match=rf"{name}.*rollout\.vllm\.python"):
            process.start()
        assert not (tmp_path / "log").exists()


def test_a_server_ends_with_the_process_that_started_it(tmp_path, model_folder):
    process, port = build(tmp_path, model_folder, has_child=True)
    code = (
        "import time; from pathlib import Path; from vlm_grpo.serve.server import ServerProcess;"
        f"ServerProcess({process.command!r}, {{}}, Path({str(process.log)!r})).start();"
        "time.sleep(1000)"
    )
    starter = Popen([sys.executable, "-c", code], start_new_session=True, stderr=DEVNULL)
    try:
        wait_for(lambda: is_listening(port))
        pids = find_pids(tmp_path)
        os.killpg(starter.pid, signal.SIGKILL)  # which it cannot notice
        starter.wait(30)
        wait_for(lambda: not any(map(is_alive, pids)))
        wait_for(lambda: not is_listening(port))
    finally:
        starter.kill()
        starter.wait()


TREE = "sleep 1000 & echo $! > child; echo $$ > parent;"
"""A command with a child; both write their numbers."""


@pytest.fixture
def start(tmp_path: Path, watch_program: Path) -> Iterator[Any]:
    """Return a function that runs a shell command under the watch."""
    started = []

    def run(command: str) -> Popen[bytes]:
        arguments = [sys.executable, "-IS", str(watch_program), "sh", "-c", command]
        started.append(Popen(arguments, stdin=PIPE, cwd=tmp_path))
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
def test_exit_status_of_the_command(start, tmp_path, command, status):
    """The children that it has left are killed."""
    assert start(f"{TREE} {command}").wait(30) == status
    wait_for(lambda: not any(map(is_alive, read_numbers(tmp_path))))


def test_signals_of_the_terminal_are_ignored(start, tmp_path):
    """The run decides when its server ends; the server itself reacts to signals as always."""
    process, signals = start(f"{TREE} wait"), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    parent, _ = read_numbers(tmp_path)
    for number in signals:
        process.send_signal(number)
    time.sleep(0.1)
    assert process.poll() is None
    assert is_alive(parent)
    status = Path(f"/proc/{parent}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    for number in signals:
        assert not ignored >> (number - 1) & 1, number
    process.stdin.close()
    assert process.wait(30) == 143  # 128 + 15 (SIGTERM)
    wait_for(lambda: not any(map(is_alive, read_numbers(tmp_path))))
