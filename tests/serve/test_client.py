"""vLLM's HTTP interface, against a server that stands in for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_vllm import read_calls, run_fake

from vlm_grpo.errors import UserError
from vlm_grpo.serve.client import VllmClient, WeightLabel
from vlm_grpo.serve.process import find_free_port
from vlm_grpo.utils.http_json import ServiceError


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"version": "0.31.2"}, "runs vLLM 0.31.2: install 0.32 or later"),
        ({"served": "Qwen2.5-VL"}, "serves Qwen2.5-VL: start it by vlm-grpo serve"),
        ({"missing": ["/weight_info"]}, "/weight_info: status 404 .*: start it by vlm-grpo serve"),
        ({"missing": ["/inference/v1/generate"]}, "generate: status 404 .*: start it by"),
        ({"missing": ["/version"]}, "/version: status 404 .*: start it by"),
        ({"faults": {"/version": {"*": '"ok"'}}}, "/version: .*: start it by"),
        ({"faults": {"/version": {"*": "400"}}}, "/version: status 400 .*: start it by"),
        ({"faults": {"/v1/models": {"*": "[]"}}}, "/v1/models: .*: start it by"),
    ],
)
def test_servers_that_do_not_fit_a_run(
    tmp_path: Path, model_folder: Path, plan: Any, message: str
) -> None:
    with run_fake(tmp_path / "fake", model_folder, **plan) as url:
        client = VllmClient(url, 5)
        assert client.is_ready()
        with pytest.raises(UserError, match=message) as caught:
            client.check()
        assert url in str(caught.value)


@pytest.mark.parametrize("version", ["0.32.0", "0.100.0.dev3+cpu", "1.0", "0.32"])
def test_a_server_that_fits(tmp_path: Path, model_folder: Path, version: str) -> None:
    with run_fake(tmp_path / "fake", model_folder, version=version) as url:
        VllmClient(url, 5).check()


def test_when_a_server_is_ready(tmp_path: Path, model_folder: Path) -> None:
    """A refusal will not pass by waiting; what is missing is told by ``check``."""
    assert not VllmClient(f"http://127.0.0.1:{find_free_port()}", 5).is_ready()
    faults = {"1": "503", "2": "500", "3": "401"}
    with run_fake(tmp_path / "fake", model_folder, faults={"/v1/models": faults}) as url:
        client = VllmClient(url, 5)
        assert [client.is_ready() for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("is_on_cpu", [False, True])
def test_new_weights_are_loaded_while_the_server_is_paused(
    tmp_path: Path, model_folder: Path, is_on_cpu: bool
) -> None:
    """Both caches are emptied before a request can be answered from older weights."""
    fake = tmp_path / "fake"
    with run_fake(fake, model_folder) as url:
        client = VllmClient(url, 5, is_on_cpu)
        client.pause()
        client.load_files(model_folder)
        client.resume("weights/run/3")
        assert client.get_version() == "weights/run/3"
    paths = [call["path"] for call in read_calls(fake)[:-1]]
    resets = ["/reset_encoder_cache", "/reset_prefix_cache"]
    loads = ["/collective_rpc"] * (1 + is_on_cpu)
    assert paths == ["/pause", *loads, *resets, "/update_weight_version", "/resume"]
    calls = [call["body"] for call in read_calls(fake, "/collective_rpc")]
    assert calls[0] == {"method": "reload_weights", "kwargs": {"weights_path": str(model_folder)}}
    assert calls[1:] == [{"method": "pack_tied_weights"}] * is_on_cpu


def test_an_adapter_replaces_the_one_before(tmp_path: Path, model_folder: Path) -> None:
    fake = tmp_path / "fake"
    with run_fake(fake, model_folder) as url:
        client = VllmClient(url, 5)
        client.pause()
        client.load_adapter(model_folder)
        client.resume("adapters/run/1")
    (call,) = read_calls(fake, "/v1/load_lora_adapter")
    folder = str(model_folder)
    expected = {"lora_name": "policy-adapter", "lora_path": folder, "load_inplace": True}
    assert call["body"] == expected


@pytest.mark.parametrize("answer", ['{"success": false}', "{}", "[]"])
def test_a_prefix_cache_that_is_not_emptied_is_a_failure(
    tmp_path: Path, model_folder: Path, answer: str
) -> None:
    faults = {"/reset_prefix_cache": {"*": answer}}
    with (
        run_fake(tmp_path / "fake", model_folder, faults=faults) as url,
        pytest.raises(ServiceError, match="prefix"),
    ):
        VllmClient(url, 5).resume("weights/run/1")
    assert read_calls(tmp_path / "fake", "/resume") == []


def test_a_weight_label_tells_the_versions_of_its_own_run() -> None:
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
