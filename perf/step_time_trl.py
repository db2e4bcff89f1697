"""Run GRPO steps of TRL's GRPOTrainer, for ``step_time.py``."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from measurement import LORA, QUESTION, Steps, measure, noise_reward, synchronize
from peft import LoraConfig
from step_time import parse_arguments
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimer(TrainerCallback):
    """A callback that times every step, and its rollout with the copy of the weights to vLLM."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rollouts: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self.started)

    def time_rollout(self, generate: Callable) -> Callable:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            started = time.perf_counter()
            completions = generate(*args, **kwargs)
            synchronize()
            self.rollouts.append(time.perf_counter() - started)
            return completions

        return timed


def noise(completions: list, **kwargs: Any) -> list[float]:
    return [noise_reward(completion[0]["content"]) for completion in completions]


def run_steps(options: argparse.Namespace, model: Any, processor: Any, images: list) -> Steps:
    rows = {
        "prompt": [[{"role": "user", "content": QUESTION}] for _ in images],
        "image": images,
    }

    batch = options.prompts * options.generations
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.trl_batch or batch,
            gradient_accumulation_steps=batch // (options.trl_batch or batch),
            num_generations=options.generations,
            max_completion_length=options.tokens,
            generation_kwargs={"min_new_tokens": options.tokens},
            max_steps=options.steps + 1,
            beta=0.0,
            learning_rate=1e-6,
            bf16=options.dtype == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=options.checkpointing != "none",
            use_vllm=options.child == "trl-vllm",
            model_init_kwargs={"dtype": options.dtype} if options.child == "trl-vllm" else None,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        lora = LoraConfig(
            **LORA,
            target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
            task_type="CAUSAL_LM",
        )
        if options.child == "trl-vllm":  # vLLM loads the weights from a folder
            model.save_pretrained(f"{folder}/model")
            processor.save_pretrained(f"{folder}/model")
            model.to("meta")  # TRL loads another copy, in place of this one
            model = f"{folder}/model"
        timer = StepTimer()
        trainer = GRPOTrainer(
            model=model,
            processing_class=processor,
            reward_funcs=noise,
            args=config,
            train_dataset=Dataset.from_dict(rows),
            peft_config=None if options.full else lora,
            callbacks=[timer],
        )
        trainer._generate = timer.time_rollout(trainer._generate)  # noqa: SLF001
        trainer.train()
    return Steps(timer.seconds, {"rollout": timer.rollouts}, tokens=batch * options.tokens)


if __name__ == "__main__":
    print(json.dumps(measure(parse_arguments(), run_steps)))
