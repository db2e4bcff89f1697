"""A real vLLM server on a CPU, for tests that ``make vllm`` runs.

``VLLM_PYTHON`` is the Python of vLLM's environment; without it the tests are skipped.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.other import get_free_port
from vllm_runs import LORA, make_settings, run_servers

from vlm_grpo import Settings, load_policy
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.serve.launch import build_command, build_environment, build_program
from vlm_grpo.serve.sampler import VllmSampler
from vlm_grpo.serve.server import ServerProcess
from vlm_grpo.training.update import build_updater


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of vLLM's environment."""
    if not (found := os.environ.get("VLLM_PYTHON")):
        pytest.skip("needs vLLM: make vllm")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return Path(found)


@pytest.fixture(scope="session")
def server_processes(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[str, ServerProcess]]]:
    """Addresses and processes of two servers of the embedded model, with adapters enabled."""
    folder = tmp_path_factory.mktemp("servers")
    settings = make_settings(folder, [], f"rollout.vllm.python={vllm_python}", *LORA)
    commands = {}
    for _ in range(2):
        port = get_free_port()
        command = build_command(settings, ("127.0.0.1", port), on_gpu=False)
        short = ("--enforce-eager", "--max-model-len=1024")  # starts sooner
        commands[port] = [*build_program(vllm_python), *command, *short]
    environment = build_environment(settings, torch.device("cpu"))
    with run_servers(commands, environment, folder) as found:
        yield found


@pytest.fixture
def make_sampler(
    tmp_path: Path, server_processes: list[tuple[str, ServerProcess]]
) -> Iterator[Callable[..., tuple[VllmSampler, Strategy, Settings]]]:
    """A function that returns a sampler, with its strategy and settings."""
    samplers: list[VllmSampler] = []

    def make(*overrides: str, urls: list[str] | None = None) -> Any:
        # A server that was given full weights has not the base weights of adapters any more.
        kind = int(any("lora" in override for override in overrides))
        settings = make_settings(tmp_path, urls or [server_processes[kind][0]], *overrides)
        strategy = build_updater(load_policy(settings), settings, Accelerator(cpu=True)).strategy
        samplers.append(VllmSampler(strategy, settings))
        return samplers[-1], strategy, settings

    yield make
    for sampler in samplers:
        sampler.close()
