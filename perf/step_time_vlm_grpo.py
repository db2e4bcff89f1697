"""Run GRPO steps of this toolkit's trainer, for ``step_time.py``."""

from __future__ import annotations

import argparse
import io
import math
import tempfile
import time
from typing import Any

import torch
from measurement import LORA, QUESTION, measure, noise_reward, synchronize
from step_time import parse_arguments
from torch.utils.flop_counter import FlopCounterMode

from vlm_grpo.config.run import Settings
from vlm_grpo.engine.attention import use_shared_attention
from vlm_grpo.engine.sampling import build_sampling_distribution
from vlm_grpo.families import load_family
from vlm_grpo.model.loading import LoadedModel, apply_lora_or_freeze
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task, reward
from vlm_grpo.trainer import Trainer
from vlm_grpo.types import Example, ImageRef

OUTPUT = tempfile.TemporaryDirectory()
"""Output folder of the run, deleted when the process ends."""
ONEDNN = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001


def onednn_flops(input: Any, weight: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """Return the FLOPs of a oneDNN product, which PyTorch's counter does not know."""
    return 2 * math.prod(input) * weight[0]


class NoiseTask(Task):
    primary_metric = "noise"

    def parse(self, text: str, example: Example) -> str:
        return text

    @reward()
    def noise(self, answer: str, example: Example) -> float:
        return noise_reward(answer)


def build_trainer(
    options: argparse.Namespace, model: Any, processor: Any, images: list, shared: bool = True
) -> Trainer:
    """Build a trainer of the model; ``options.objective`` may hold settings of the loss."""
    settings = Settings.model_validate(
        {
            "task": "noise",
            "model": "random",
            "data": {"train": "unused"},
            "output_dir": OUTPUT.name,
            "policy": {
                "dtype": options.dtype,
                "gradient_checkpointing": options.checkpointing,
                "lora": None if options.full else {"r": LORA["r"], "alpha": LORA["lora_alpha"]},
            },
            "rollout": {
                "num_generations": options.generations,
                "max_completion_length": options.tokens,
                "min_new_tokens": options.tokens,
            },
            "optim": {
                "prompts_per_step": options.prompts,
                "max_steps": options.steps + 1,
                "max_tokens_per_batch": options.max_tokens,
            },
            "objective": vars(options).get("objective", {}),
            "logging": {"samples_every": 0},
        }
    )
    family = load_family(model.config)
    adapters = apply_lora_or_freeze(model, settings.policy)
    if shared:
        use_shared_attention(family, model)
    budget = family.pixel_budget(processor)
    loaded = LoadedModel(model, processor, family, budget, shared, adapters)
    distribution = build_sampling_distribution(model, family, settings.rollout)
    policy = Policy(loaded, distribution, settings.policy.head_chunk_tokens)
    policy.stopwatch.wait = synchronize
    examples = []
    for index, image in enumerate(images):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        reference = ImageRef(str(index), image.size, image.size, data=buffer.getvalue())
        examples.append(Example(str(index), (reference,), QUESTION, ""))
    return Trainer(settings, policy, NoiseTask(), examples, [])


def run_steps(options: argparse.Namespace, model: Any, processor: Any, images: list) -> tuple:
    trainer = build_trainer(options, model, processor, images, options.child == "shared")
    policy = trainer.policy
    seconds, phases = [], {}
    for _ in range(options.steps + 1):
        policy.stopwatch.reset()
        synchronize()
        started = time.perf_counter()
        metrics = trainer.step()
        synchronize()
        seconds.append(time.perf_counter() - started)
        for name in ("prompts", "vision", "prefill", "decode", "reward", "update"):
            phases.setdefault(name, []).append(metrics.get(f"time/{name}", 0.0))
    with FlopCounterMode(display=False, custom_mapping={ONEDNN: onednn_flops}) as counter:
        trainer.step()
    return seconds, phases, counter.get_total_flops()


if __name__ == "__main__":
    measure(parse_arguments(), run_steps)
