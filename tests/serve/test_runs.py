"""Runs whose servers work, fail, and are stopped."""

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from commands import fails
from fake_vllm import read_calls, run_fake
from processes import is_alive, is_listening, wait_for
from safetensors.torch import load_file
from small_runs import LORA, assert_same_run, load_weights, read_metrics

from vlm_grpo import Settings, cli, train

GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module", autouse=True)
def _forks() -> None:
    forked.start_server()


def find_pids(fake: Path) -> list[int]:
    """Return all servers and children that a run has started."""
    pids = [call["pid"] for call in read_calls(fake, "start")]
    child = fake / "child"  # empty while it is written
    return [*pids, *map(int, child.read_text().split() if child.exists() else [])]


def assert_nothing_is_left(settings: Settings, fake: Path) -> None:
    """Check that no server, child or port is left, and no file of weights."""
    wait_for(lambda: not any(is_alive(pid) for pid in find_pids(fake)))
    assert find_pids(fake)
    for call in read_calls(fake, "start"):
        (port,) = (int(a.partition("=")[2]) for a in call["body"] if a.startswith("--port="))
        wait_for(lambda port=port: not is_listening(port))
    assert not (settings.run_dir / "vllm").exists()


def write(settings: Settings, folder: Path) -> Path:
    (folder / "run.yaml").write_text(settings.model_dump_json())
    return folder / "run.yaml"


@pytest.mark.parametrize("policy", [{"dtype": "float32"}, LORA], ids=["full weights", "adapters"])
def test_each_step_is_sampled_with_weights_of_its_checkpoint(settings, fake, model_folder, policy):
    every = {"every": 1, "keep_last": 10}
    build = settings({"has_child": True}, policy=policy, checkpoint=every)
    train(build)
    assert len(read_metrics(build.run_dir)) == 4
    versions = [call["version"] for call in read_calls(fake, GENERATE)[1:]]
    assert [int(version.rpartition("/")[2]) for version in versions] == sorted([0, 1, 2, 3] * 3)
    folders = [build.run_dir / f"checkpoints/step-{version}" for version in range(1, 4)]
    if "lora" not in policy:
        folders.append(model_folder)  # the weights at the start
    (name,) = (file.name for file in (fake / "loaded/1").glob("*.safetensors"))
    for version, folder in zip((1, 2, 3, 0), folders, strict=False):
        found, saved = load_file(fake / f"loaded/{version}/{name}"), load_weights(folder)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key], saved[key]) for key in saved)
    first = load_file(fake / f"loaded/0/{name}")
    assert not any(weight.any() for key, weight in first.items() if "lora_B" in key)
    assert_nothing_is_left(build, fake)


@pytest.fixture
def make_whole(settings: Any, tmp_path: Path, model_folder: Path) -> Any:
    """Return a function that makes the run of some settings without a failure."""

    def make(**changes: Any) -> Path:
        with run_fake(tmp_path / "whole", model_folder) as url:
            build = settings(urls=[url], output_dir=str(tmp_path / "whole-runs"), **changes)
            train(build)
        return build.run_dir

    return make


@pytest.mark.parametrize(("fault", "ahead"), [("hang", 0), ("die", 1)])
def test_a_server_that_fails_in_mid_rollout_is_restarted(
    settings, fake, make_whole, caplog, fault, ahead
):
    rollout = {"steps_ahead": ahead}
    # The 6th request is the 2nd of the second step: before it are the check's and three.
    plan = {"faults": {GENERATE: {"6": fault}}, "has_child": True}
    build = settings(plan, vllm={"request_timeout": 2.0}, rollout=rollout)
    train(build)
    assert_same_run(make_whole(rollout=rollout), build.run_dir)
    assert len(read_calls(fake, "start")) == 2
    assert "the vLLM server failed (http://127.0.0.1:" in caplog.text
    assert "is restarted (1 of 3); its log is" in caplog.text
    assert str(build.run_dir / "vllm-0.log") in caplog.text
    assert_nothing_is_left(build, fake)


def test_a_server_that_fails_each_time_ends_the_run_and_loses_nothing(
    settings, fake, make_whole, capsys, tmp_path
):
    # The requests of the first start: the check's, and one of each of two steps; of the second
    # one: the check's, and the same prompt's again.
    plan = {"faults": {GENERATE: {"3": "die", "5": "die"}}}
    build = settings(plan, optim={"prompts_per_step": 1}, vllm={"max_restarts": 1})
    error = fails(capsys, "train", write(build, tmp_path), "--trust-code")
    log = build.run_dir / "vllm-0.log"
    assert "failed 2 times in one rollout (rollout.vllm.max_restarts=1)" in error
    assert f"its log {log} ends with:" in error
    assert "INFO fake vLLM loads the model" in error
    assert_nothing_is_left(build, fake)
    (fake / "plan.json").write_text("{}")
    train(build.model_copy(update={"resume": True}))
    assert_same_run(make_whole(optim={"prompts_per_step": 1}), build.run_dir)
    assert log.read_text().count("$ ") == 3  # what failed is still there


def test_a_server_that_is_not_ready_in_time_is_one_message(settings, fake, capsys, tmp_path):
    build = settings({"starts": {"*": "never"}}, vllm={"startup_timeout": 0.5, "max_restarts": 1})
    error = fails(capsys, "train", write(build, tmp_path), "--trust-code")
    assert re.search(r"not ready after [01] s \(rollout.vllm.startup_timeout\); its log", error)
    assert error.count("error: ") == 1
    assert_nothing_is_left(build, fake)


def test_a_port_that_is_in_use(settings, fake, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("vlm_grpo.serve.server.SHORT_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr("vlm_grpo.serve.sampler.get_free_port", lambda: port)
        build = settings()
        error = fails(capsys, "train", write(build, tmp_path), "--trust-code")
    assert "the vLLM server ended while it started; its log" in error
    assert "Address already in use" in error


def call_cli(arguments: list[str]) -> None:
    os.setpgid(0, 0)  # as a shell does
    cli.main(arguments)


@pytest.mark.parametrize("when", ["rollout", "start"])
def test_ctrl_c_saves_the_run_and_ends_its_servers(settings, fake, tmp_path, when):
    plans = {"rollout": {"faults": {GENERATE: {"6": "hang"}}}, "start": {"starts": {"1": "never"}}}
    build = settings({**plans[when], "has_child": True}, vllm={"request_timeout": 200.0})
    output, words = tmp_path / "output", ["train", str(write(build, tmp_path)), "--trust-code"]
    output.touch()
    process = forked.start(output, call_cli, words)
    try:
        if when == "rollout":
            wait_for(lambda: len(read_calls(fake, GENERATE)) == 7)  # the other two are answered
        else:
            wait_for(lambda: len(find_pids(fake)) == 2 and "run folder" in output.read_text())
        assert process.pid is not None
        assert all(is_alive(pid) for pid in find_pids(fake))
        os.killpg(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        process.kill()
    text = output.read_text()
    assert process.exitcode == 130, text
    assert "Traceback" not in text
    ends = ["checkpoints/step-1; continue with resume=true"]
    if when == "start":  # perhaps before the first step could be stopped
        ends = ["checkpoints/step-0; continue with", "interrupted; finished checkpoints are kept"]
    assert any(end in text for end in ends)
    assert_nothing_is_left(build, fake)
