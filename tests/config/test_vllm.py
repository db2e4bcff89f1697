"""The settings of vLLM servers: what they accept, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.vllm import VllmSettings
from vlm_grpo.errors import UserError

URL = "http://127.0.0.1:8000"


def test_addresses_are_written_alike() -> None:
    given = ["http://127.0.0.1:8000/v1", "https://gpu-7:8000/"]
    assert VllmSettings(urls=tuple(given)).urls == (URL, "https://gpu-7:8000")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "set either rollout.vllm.python"),
        ({"python": "python", "urls": [URL]}, "set either rollout.vllm.python"),
        ({"urls": ["127.0.0.1:8000"]}, "must start with http"),
        ({"urls": [URL, URL]}, "an address is listed twice"),
        ({"urls": [URL], "arguments": ["--enforce-eager"]}, "vllm.arguments has no effect on runn"),
        ({"urls": [URL], "sleep_level": 0}, "vllm.sleep_level has no effect on running servers"),
        ({"urls": [URL], "weight_transfer": "ipc"}, "use nccl or files"),
        ({"python": "python", "weight_transfer": "nccl"}, "use ipc or files"),
    ],
)
def test_combinations_without_an_effect_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        VllmSettings(**values)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.sampler=vllm"], "rollout.sampler=vllm needs servers: set either"),
        ([f"rollout.vllm.urls=[{URL}]"], "rollout.vllm has no effect without rollout.sampler=vllm"),
        (
            ["rollout.sampler=vllm", "rollout.vllm.python=p", "rollout.torch_compile=true"],
            "rollout.torch_compile=true compiles the steps that the policy captures",
        ),
        (["rollout.cuda_graphs=false", "rollout.torch_compile=true"], "cuda_graphs=false leave"),
        (
            [
                "rollout.sampler=vllm",
                "rollout.vllm.python=p",
                "rollout.vllm.sleep_level=1",
                "rollout.steps_ahead=1",
            ],
            "sleep_level has no effect with rollout.steps_ahead=1",
        ),
        (
            [
                "rollout.sampler=vllm",
                "rollout.vllm.python=p",
                "rollout.vllm.weight_transfer=ipc",
                "rollout.steps_ahead=2",
            ],
            "use files, or one step",
        ),
        (
            [
                "rollout.sampler=vllm",
                "rollout.vllm.python=p",
                "rollout.vllm.sleep_level=2",
                "policy.lora.r=8",
            ],
            "sleep_level=2 drops the base weights",
        ),
        (
            [
                "rollout.sampler=vllm",
                "rollout.vllm.python=p",
                "policy.lora.r=8",
                "policy.load_in=4bit",
            ],
            "the servers have the whole weights",
        ),
    ],
)
def test_servers_and_other_settings_must_agree(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_settings("counting", overrides)


def test_servers_with_the_whole_weights_are_allowed_with_a_chosen_correction() -> None:
    overrides = ["rollout.sampler=vllm", "rollout.vllm.python=p", "policy.lora.r=8"]
    overrides += ["policy.load_in=4bit", "objective.sampler_correction=token"]
    assert load_settings("counting", overrides).policy.load_in == "4bit"
