"""Tokens per second of a rollout by the policy and by a vLLM server, and their ratio.

All completions are as long as allowed, so that both sample the same number of tokens. The samplers
take turns; the first rollout of each shape, in which they compile or capture, is not counted.

    vlm-grpo serve quickstart --for-rollouts --python VLLM_PYTHON --port 8000 &
    python perf/samplers.py --url http://127.0.0.1:8000 --out perf/results/samplers.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.serve.sampler import VllmSampler
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.update import build_updater
from vlm_grpo.types import Completion, Prompt

Sample = Callable[[SamplingSettings, int], list[tuple[Completion, ...]]]


def build_samplers(options: argparse.Namespace) -> tuple[Policy, dict[str, Sample]]:
    """Return the policy, and functions that sample the same prompts."""
    settings = load_settings(
        "quickstart",
        [
            f"model={options.model}",
            "rollout.sampler=vllm",
            f"rollout.vllm.urls=[{options.url}]",
            *options.overrides,
        ],
    )
    policy = load_policy(settings)
    strategy = build_updater(policy, settings, Accelerator()).strategy
    sampler = VllmSampler(strategy, settings)
    sampler.publish(0)
    task = load_task("counting")
    examples = load_examples(settings.data.train, task, settings.data, "train")
    prompts: list[Prompt] = [
        policy.prompts.build(policy.prompts.with_resized_sizes(example), task)
        for example in examples[: options.prompts]
    ]
    seeds = [(0, index) for index in range(len(prompts))]

    def sample_by_policy(sampling: SamplingSettings, group: int) -> list[tuple[Completion, ...]]:
        groups = policy.sample(prompts, sampling, group, seeds)
        policy.engine.clear_image_features()
        return groups

    def sample_by_vllm(sampling: SamplingSettings, group: int) -> list[tuple[Completion, ...]]:
        return sampler.start(prompts, sampling, group, seeds).result()

    return policy, {"policy": sample_by_policy, "vllm": sample_by_vllm}


def measure(sample: Sample, sampling: SamplingSettings, group: int) -> float:
    """Return the tokens per second of a rollout."""
    began = time.perf_counter()
    groups = sample(sampling, group)
    seconds = time.perf_counter() - began
    return sum(len(c.token_ids) for members in groups for c in members) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", required=True, help="address of a server for rollouts")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 64, 512])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="settings, such as policy.dtype=bfloat16")
    options = parser.parse_args()
    policy, samplers = build_samplers(options)
    device = policy.device
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    rows: list[dict[str, Any]] = []
    for group in options.groups:
        for length in options.lengths:
            distribution = policy.distribution
            policy.distribution = type(distribution)(
                distribution.temperature, distribution.banned, distribution.eos, length
            )
            sampling = SamplingSettings(policy.distribution, length)
            speeds: dict[str, list[float]] = {sampler: [] for sampler in samplers}
            for repeat in range(options.repeats + 1):
                for sampler, sample in samplers.items():
                    speed = measure(sample, sampling, group)
                    if repeat:
                        speeds[sampler].append(speed)
            ratios = [a / b for a, b in zip(speeds["policy"], speeds["vllm"], strict=True)]
            row = {
                "G": group,
                "tokens": length,
                **{f"{sampler}": statistics.median(found) for sampler, found in speeds.items()},
                "policy / vllm": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out is not None:
        result = {"device": name, "model": options.model, "prompts": options.prompts, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
