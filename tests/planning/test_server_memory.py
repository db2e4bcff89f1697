"""The memory of a step whose completions are sampled by vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.planning.devices import CONTEXT, GIB, Device
from vlm_grpo.planning.planner import Planner, plan

OWN = "rollout.vllm.python=/opt/vllm/bin/python"
SHARED = "rollout.vllm.urls=[http://127.0.0.1:8000]"
GPU = Device("GPU", 80 * GIB)
SERVER = int(0.3 * GPU.memory)
"""What ``rollout.vllm.gpu_memory_utilization`` is by default."""


def make_settings(*overrides: str) -> Settings:
    return load_settings("counting", ["data.train_limit=4", *overrides])


@pytest.mark.parametrize(
    ("overrides", "server", "level"),
    [
        ((OWN,), SERVER, 2),
        ((OWN, "policy.lora.r=8"), SERVER, 0),
        ((OWN, "rollout.vllm.sleep_level=1", "policy.lora.r=8"), SERVER, 1),
        ((OWN, "rollout.steps_ahead=1"), SERVER, None),
        ((OWN, "rollout.vllm.gpu_memory_utilization=0.5"), GPU.memory // 2, 2),
    ],
)
def test_a_server_of_the_run_takes_its_share_while_it_samples(
    overrides: tuple[str, ...], server: int, level: int | None
) -> None:
    planner = Planner(make_settings("rollout.sampler=vllm", *overrides), GPU)
    step = planner.estimate_step(planner.settings)
    weights = step.shape.num_weights * 4  # bytes in float32, the precision of the recipe
    assert step.memory.server == server
    left = {None: server, 0: CONTEXT + weights, 1: CONTEXT, 2: CONTEXT}[level]
    assert step.memory.resting == left
    assert step.memory.rollout == step.memory.persistent + server
    without = (override for override in overrides if "rollout" not in override)
    alone = planner.estimate_step(make_settings(*without)).memory
    assert step.memory.backward == alone.backward + left


def test_servers_elsewhere_take_nothing_here() -> None:
    planner = Planner(make_settings("rollout.sampler=vllm", SHARED), GPU)
    memory = planner.estimate_step(planner.settings).memory
    assert memory.rollout == memory.persistent
    assert (memory.server, memory.resting) == (0, 0)


def test_the_plan_names_the_server(tmp_path: Path) -> None:
    settings = make_settings("rollout.sampler=vllm", OWN)
    text = str(plan(settings, "80GB"))
    assert "server          24.00  rollout: a vLLM server on this device" in text
    assert "resting          1.00  update: what that server keeps" in text
    assert "23.0 GiB for keys" in text
    assert "time       not estimated with vLLM" in text
    small = make_settings("rollout.sampler=vllm", OWN, "rollout.vllm.gpu_memory_utilization=0.01")
    assert "raise rollout.vllm.gpu_memory_utilization" in str(plan(small, "80GB"))
