"""The commands that start vLLM servers, and the choices that depend on the device."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import save_tiny_model

from vlm_grpo import Settings, UserError, load_policy, load_settings
from vlm_grpo.model.chat_template import ChatTemplate
from vlm_grpo.model.families.family import find_part
from vlm_grpo.serve import launch, weights

OWN = "rollout.vllm.python=/opt/vllm/bin/python"
SHARED = "rollout.vllm.urls=[http://127.0.0.1:8000]"
ADDRESS = ("127.0.0.1", 8000)
GPU = torch.device("cuda", 1)


def make_settings(*overrides: str) -> Settings:
    return load_settings("quickstart", ["rollout.sampler=vllm", *overrides])


def read_options(command: list[str]) -> dict[str, str]:
    """Return the options of a command, with empty values for flags."""
    assert command[0] == "serve"
    pairs = (word.removeprefix("--").partition("=") for word in command[2:])
    return {name: value for name, _, value in pairs}


def test_a_server_is_described_without_the_weights():
    for lora in ((), ("policy.lora.r=8",), ("policy.lora.r=9", "policy.lora.target=all")):
        settings = make_settings(OWN, "policy.max_pixels=5000", *lora)
        policy = load_policy(settings)
        trained = {find_part(name) for name, _ in policy.trainable_parameters()}
        assert launch.describe_adapter(settings)[0] == (trained if lora else set())
        options = read_options(launch.build_command(settings, ADDRESS))
        assert json.loads(options["mm-processor-kwargs"])["size"]["longest_edge"] == 5000
        assert options["logprobs-mode"] == "processed_logprobs"
        assert options["served-model-name"] == "policy"
        assert options["dtype"] == settings.policy.dtype
        assert ("enable-lora" in options) == bool(lora)
        assert ("enable-tower-connector-lora" in options) == (len(lora) == 2)
        if lora:
            assert options["max-lora-rank"] == ("16" if len(lora) == 2 else "8")
    ranks = {1: 1, 2: 8, 64: 64, 300: 320, 600: 600}  # those that vLLM allows
    assert {rank: launch.round_up_rank(rank) for rank in ranks} == ranks


def test_flags_of_a_gpu_and_of_the_memory_of_a_server_of_the_run(monkeypatch):
    own = make_settings(OWN, "rollout.vllm.max_model_length=900", "rollout.vllm.arguments=[--x=1]")
    options = read_options(launch.build_command(own, ADDRESS))
    assert (options["max-model-len"], options["x"]) == ("900", "1")
    assert options["gpu-memory-utilization"] == "0.3"
    assert "weight-transfer-config" not in options
    assert "enable-sleep-mode" not in options
    shared = launch.build_command(make_settings(SHARED), ADDRESS)
    assert "gpu-memory-utilization" not in read_options(shared)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    for overrides, transfer, sleeps in (
        ((OWN,), "ipc", True),
        ((OWN, "rollout.steps_ahead=1"), "ipc", False),
        ((OWN, "rollout.steps_ahead=2"), None, False),
        ((OWN, "rollout.vllm.weight_transfer=files"), None, True),
        ((OWN, "policy.lora.r=8"), None, True),
        ((SHARED,), "nccl", False),  # a server of vlm-grpo serve, whose runs may ask for it
        ((SHARED, "policy.lora.r=8"), None, False),
    ):
        settings = make_settings(*overrides)
        options = read_options(launch.build_command(settings, ADDRESS))
        expected = None if transfer is None else json.dumps({"backend": transfer})
        assert options.get("weight-transfer-config") == expected
        assert ("enable-sleep-mode" in options) == sleeps
        assert "worker-extension-cls" not in options  # for CPUs
        if OWN in overrides:
            environment = launch.build_environment(settings, GPU)
            assert environment["CUDA_VISIBLE_DEVICES"] == "6"
            assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in environment) == (transfer == "ipc")


def test_what_a_server_frees_depends_on_what_fits(monkeypatch):
    memory = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    for count, level, *overrides in (
        (1, 2, OWN),
        (250, 0, OWN, "policy.lora.r=8"),
        (251, 1, OWN, "policy.lora.r=8"),
        (1, None, OWN, "rollout.steps_ahead=1"),
        (1, None, SHARED),
    ):
        settings = make_settings(*overrides)
        weight = torch.nn.Parameter(torch.empty(count, dtype=torch.uint8, device="meta"), False)
        model = torch.nn.ParameterList([weight])
        policy: Any = SimpleNamespace(device=GPU, adapters=settings.policy.lora, model=model)
        assert launch.choose_sleep_level(policy, settings) == level


def test_what_needs_a_gpu_is_refused_on_a_cpu():
    for way, servers in {"ipc": OWN, "nccl": SHARED}.items():
        settings = make_settings(servers, f"rollout.vllm.weight_transfer={way}")
        with pytest.raises(UserError, match=f"weight_transfer={way} needs a GPU"):
            weights.choose_transfer(settings, on_gpu=False)
        assert weights.choose_transfer(settings, on_gpu=True) == way
    assert launch.choose_sleep_level(load_policy(settings), make_settings(OWN)) is None


def test_users_get_the_trained_model_under_its_name_with_its_chat(tmp_path, monkeypatch):
    settings = load_settings("quickstart", ["policy.lora.r=8", "policy.max_pixels=5000"])
    folder = tmp_path / "step-3"
    load_policy(settings).save(folder, load_policy(settings).weights())
    assert launch.describe_adapter(settings, folder) == ({"language"}, 8)
    options = read_options(launch.build_public_command(settings, folder, "mine", ADDRESS))
    assert options["lora-modules"] == f"mine={folder}"
    assert options["served-model-name"] == "mine-base"
    assert options["generation-config"] == "vllm"
    assert json.loads(options["mm-processor-kwargs"])["size"]["longest_edge"] == 5000
    video = {"video": {"num_frames": -1, "fps": 2}}  # the default of data.video.fps
    assert json.loads(options["media-io-kwargs"]) == video
    full = load_settings("quickstart", ["policy.max_pixels=5000", "policy.max_video_pixels=90000"])
    save_tiny_model(tmp_path / "qwen3", "qwen3_vl")
    qwen3 = full.model_copy(update={"model": str(tmp_path / "qwen3")})
    assert read_options(launch.build_command(qwen3, ADDRESS))["mm-processor-cache-gb"] == "0"
    command = launch.build_public_command(full, tmp_path / "qwen3", "mine", ADDRESS)
    assert "mm-processor-cache-gb" not in read_options(command)  # no clips of runs
    sizes = json.loads(read_options(command)["mm-processor-kwargs"])
    # Of an image of one frame, and of all frames of a clip.
    assert sizes["images_kwargs"]["size"]["longest_edge"] == 5000
    assert sizes["videos_kwargs"]["size"]["longest_edge"] == 90000
    save_tiny_model(tmp_path / "full")
    command = launch.build_public_command(full, tmp_path / "full", "mine", ADDRESS)
    assert command[1] == str(tmp_path / "full")
    assert read_options(command)["served-model-name"] == "mine"
    assert "enable-lora" not in read_options(command)
    monkeypatch.setattr(ChatTemplate, "_is_switch", lambda self, name: True)
    settings = load_settings("quickstart", ["prompt.thinking=false"])
    options = read_options(launch.build_public_command(settings, None, "mine", ADDRESS))
    assert json.loads(options["default-chat-template-kwargs"]) == {"enable_thinking": False}
