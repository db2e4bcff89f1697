"""Servers of vLLM, and settings of short runs that sample with them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_models import Groups, pack_groups, sampled_logprobs

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve.server import Server, ServerProcess
from vlm_grpo.types import Completion, Prompt

START_SECONDS = 400.0
LORA = ("policy.lora.target=all", "policy.lora.r=8", "policy.lora.alpha=16")


def make_settings(folder: Path, urls: list[str], *overrides: str) -> Settings:
    """Return settings of short runs with vLLM; ``urls`` empty: with servers of their own."""
    servers = [f"rollout.vllm.urls=[{','.join(urls)}]"] if urls else []
    fixed = (
        *(f"output_dir={folder}", "rollout.sampler=vllm", "data.train_limit=64", "data.eval=null"),
        *("evaluation.every=0", "optim.warmup_steps=0"),
    )
    return load_settings("quickstart", [*fixed, *servers, *overrides])


@contextmanager
def run_servers(
    commands: Mapping[int, Sequence[str]], environment: Mapping[str, str], folder: Path
) -> Iterator[list[tuple[str, ServerProcess]]]:
    """Run the commands of servers, by their ports; yield addresses and processes when ready."""
    found = [
        (f"http://127.0.0.1:{port}", ServerProcess(command, environment, folder / f"{port}.log"))
        for port, command in commands.items()
    ]
    end = time.monotonic() + START_SECONDS
    try:
        for _, process in found:
            process.start()
        for url, process in found:
            while not Server(url, 10).is_ready():
                assert process.is_running, process.describe_log()
                assert time.monotonic() < end, process.describe_log()
                time.sleep(1)
        yield found
    finally:
        for _, process in found:
            process.stop()


def sample(
    sampler: Any, prompts: Sequence[Prompt], sampling: SamplingSettings, count: int, seed: int = 0
) -> list[tuple[Completion, ...]]:
    """Sample ``count`` completions of each prompt, by the servers of a ``VllmSampler``."""
    seeds = [(seed, index) for index in range(len(prompts))]
    return sampler.start(prompts, sampling, [range(count)] * len(prompts), seeds).result(300)


@torch.no_grad()
def find_difference(policy: Policy, prompts: list[Prompt], groups: Groups) -> float:
    """Return the largest difference of the sampled tokens' log-probs from the policy's."""
    scored = policy.score(pack_groups(prompts, groups)).logprobs
    policy.engine.clear_image_features()
    return float((scored - sampled_logprobs(groups)).abs().max())
