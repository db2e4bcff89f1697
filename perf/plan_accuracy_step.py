"""Measure the memory of two real steps and of their plan, for ``plan_accuracy.py``."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measurement import LORA, QUESTION, PeakMemory
from PIL import Image
from random_models import build_random_model
from step_time_vlm_grpo import OUTPUT, NoiseTask, build_policy

from vlm_grpo.config.run import Settings
from vlm_grpo.model.policy import load_policy
from vlm_grpo.planning.layer_memory import measure_layers
from vlm_grpo.planning.memory import estimate_memory
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.sizes import PromptSize, estimate_workload
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.types import Example, ImageRef

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    print(json.dumps(run_case(json.loads(sys.argv[1]))))


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Return the measured and planned peaks of a case."""
    settings = make_settings(case)
    examples = make_examples(case)
    memory = PeakMemory(DEVICE)
    trainer = build_trainer(case, settings, examples)
    peaks: dict[str, int] = {}
    trainer.policy.sample = record_peak(trainer.policy.sample, peaks, memory)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        trainer.step()
        peaks["update"] = max(peaks.get("update", 0), memory.peak())
        seconds.append(time.perf_counter() - started)
    return {"measured": peaks, "seconds": seconds[-1], **predict(case, trainer, examples[0])}


def make_settings(case: dict[str, Any]) -> Settings:
    lora = None if case["full"] else {"r": LORA["r"], "alpha": LORA["lora_alpha"]}
    return Settings.model_validate(
        {
            "task": "noise",
            "model": "random",
            "data": {"train": "unused"},
            "output_dir": OUTPUT.name,
            "policy": {
                "dtype": case["dtype"],
                "gradient_checkpointing": case["checkpointing"],
                "freeze": case["freeze"],
                "lora": lora,
                **case["policy"],
            },
            "rollout": {
                "num_generations": case["generations"],
                "max_completion_length": case["tokens"],
                "min_new_tokens": case["tokens"],
            },
            "optim": {
                "prompts_per_step": case["prompts"],
                "max_steps": 2,
                "max_tokens_per_batch": case["max_tokens"],
                "name": case["optimizer"],
            },
            "logging": {"samples_every": 0, "trackers": []},
        }
    )


def make_examples(case: dict[str, Any]) -> list[Example]:
    """Return examples of random images, for two steps."""
    random = np.random.default_rng(0)
    examples = []
    for index in range(2 * case["prompts"]):
        shape = (case["image"], case["image"], 3)
        image = Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        reference = ImageRef(str(index), image.size, image.size, data=buffer.getvalue())
        examples.append(Example(str(index), (reference,), QUESTION, ""))
    return examples


def build_trainer(case: dict[str, Any], settings: Settings, examples: list[Example]) -> Trainer:
    """Build a trainer of a random model that is prepared as by ``load_model``."""
    weights = torch.float32 if case["full"] else getattr(torch, case["dtype"])
    model, processor = build_random_model(
        case["size"], weights, DEVICE, max_pixels=case["image"] ** 2
    )
    if case["policy"]:  # of weights that are loaded as a run loads them
        folder = Path(OUTPUT.name) / "model"
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        del model
        policy = load_policy(settings.model_copy(update={"model": str(folder)}))
    else:
        policy = build_policy(settings, model, processor)
    return Trainer(settings, policy, NoiseTask(), examples, [])


def record_peak(sample: Callable, peaks: dict[str, int], memory: PeakMemory) -> Callable:
    """Wrap ``sample`` to record its peak memory, and reset the peak for the phase after it."""

    def wrapped(*arguments: Any, **named: Any) -> Any:
        memory.reset()
        completions = sample(*arguments, **named)
        peaks["rollout"] = max(peaks.get("rollout", 0), memory.peak())
        memory.reset()
        return completions

    return wrapped


def predict(case: dict[str, Any], trainer: Trainer, example: Example) -> dict[str, Any]:
    """Return the plan's estimate for the measured step."""
    settings, policy = trainer.settings, trainer.policy
    shape = read_model_shape(policy.model.config, settings.policy)
    shape = measure_layers(shape, settings.policy, on_cpu=DEVICE == "cpu")
    prompt = policy.prompts.build(policy.prompts.with_resized_sizes(example), trainer.task)
    values = prompt.vision["pixel_values"].numel()
    size = PromptSize(len(prompt.token_ids), 0, values, case["image"] ** 2)
    work = estimate_workload(settings, size, shape)
    found = estimate_memory(shape, work, on_cpu=DEVICE == "cpu")
    predicted = {"rollout": found.rollout, "update": found.backward}
    return {"predicted": predicted, "parts": vars(found), "weights": shape.num_weights}


if __name__ == "__main__":
    main()
