"""Run GRPO steps of this toolkit's trainer, for ``step_time.py``."""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from typing import Any

from measurement import LORA, QUESTION, Steps, measure, noise_reward, synchronize
from step_time import parse_arguments

from vlm_grpo.config.run import Settings
from vlm_grpo.model.adapters import apply_lora_or_freeze
from vlm_grpo.model.chat_template import ChatTemplate
from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.engine.attention import use_shared_attention
from vlm_grpo.model.engine.graphs import get_capture
from vlm_grpo.model.engine.sampling import build_sampling_distribution
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.prompts import PromptBuilder, get_context_length
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.step_time import count_step_flops
from vlm_grpo.task import Task, reward
from vlm_grpo.training.speed import profile_step
from vlm_grpo.training.step_batch import Rollout, build_slices
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.types import Example, ImageRef

OUTPUT = tempfile.TemporaryDirectory()
"""Output folder of the run, deleted when the process ends."""
PHASES = ("prompts", "vision", "prefill", "decode", "reward", "update")


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
    names = ("cuda_graphs", "torch_compile")
    graphs = {n: vars(options)[n] for n in names if vars(options).get(n) is not None}
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
                **graphs,
            },
            "optim": {
                "prompts_per_step": options.prompts,
                "max_steps": options.steps + 2,
                "max_tokens_per_batch": options.max_tokens,
            },
            "objective": vars(options).get("objective", {}),
            "logging": {"samples_every": 0},
        }
    )
    policy = build_policy(settings, model, processor, shared)
    policy.stopwatch.wait = synchronize
    return Trainer(settings, policy, NoiseTask(), make_examples(images), [])


def make_examples(images: list) -> list[Example]:
    """Return an example for each image."""
    examples = []
    for index, image in enumerate(images):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        reference = ImageRef(str(index), image.size, image.size, data=buffer.getvalue())
        examples.append(Example(str(index), (reference,), QUESTION, ""))
    return examples


def build_policy(settings: Settings, model: Any, processor: Any, shared: bool = True) -> Policy:
    """Build the policy of a random model, which is prepared as by ``load_model``."""
    family = load_family(model.config)
    if shared:
        use_shared_attention(family, model)
    enable_gradient_checkpointing(model, settings.policy.gradient_checkpointing)
    adapters = apply_lora_or_freeze(model, settings.policy)
    autocast = settings.policy.lora is None and settings.policy.dtype == "bfloat16"
    budget, limit = family.pixel_budget(processor), get_context_length(model.config)
    prompts = PromptBuilder(ChatTemplate(processor), family, budget, limit)
    loaded = LoadedModel(model, prompts, shared, adapters, autocast)
    distribution = build_sampling_distribution(model, processor, family, settings.rollout)
    capture = get_capture(settings.rollout, shared, training=True)
    return Policy(loaded, distribution, settings.policy.head_chunk_tokens, capture)


def use_dense_attention() -> None:
    """Compute attention in half precision as a GPU does in float32, with a mask."""
    kernels.has_varlen = kernels.is_cpu = lambda query: False


def run_steps(options: argparse.Namespace, model: Any, processor: Any, images: list) -> Steps:
    if options.dense:
        use_dense_attention()
    trainer = build_trainer(options, model, processor, images, options.child == "shared")
    shape = read_model_shape(model.config, trainer.settings.policy)
    steps, rollouts = Steps(), []
    sample = trainer.sampler.sample

    def sample_and_keep(*arguments: Any, **named: Any) -> Rollout:
        rollouts.append(sample(*arguments, **named))
        return rollouts[-1]

    trainer.sampler.sample = sample_and_keep
    for _ in range(options.steps + 1):
        synchronize()
        started = time.perf_counter()
        metrics = trainer.step()
        synchronize()
        steps.seconds.append(time.perf_counter() - started)
        for name in PHASES:
            steps.phases.setdefault(name, []).append(metrics.get(f"time/{name}", 0.0))
    groups = rollouts[-1].groups
    slices = build_slices(groups, [True] * options.prompts * options.generations)
    steps.flops = vars(count_step_flops(shape, groups, slices))
    steps.tokens = rollouts[-1].num_tokens
    if options.profile:
        policy = trainer.policy
        with profile_step(options.profile, policy.stopwatch, policy.device):
            trainer.step()
    trainer.sampler.close()
    return steps


if __name__ == "__main__":
    print(json.dumps(measure(parse_arguments(), run_steps)))
