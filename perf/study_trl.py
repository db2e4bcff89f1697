"""A run of TRL's GRPOTrainer with the settings of one of ours, for ``study.py``."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForImageTextToText, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_grpo import evaluate
from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import load_run
from vlm_grpo.data.objects import Objects, Rows
from vlm_grpo.model.policy import load_policy


class Saver(TrainerCallback):
    """A callback that measures the processor seconds of the steps, and saves some of the weights.

    Args:
        folder: where the weights are saved, in ``step-N``.
        every: number of steps between two savings.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every, self.seconds = folder, every, 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.process_time() - self.started
        if state.global_step % self.every == 0:
            folder = self.folder / f"step-{state.global_step}"
            kwargs["model"].save_pretrained(folder)
            kwargs["processing_class"].save_pretrained(folder)


def train_with_trl(settings: Settings, rows: Rows) -> tuple[float, dict[int, tuple[dict, ...]]]:
    """Train, and return the processor seconds, and the rows of each evaluation by its step."""
    policy = load_policy(settings)
    task, examples, _ = load_run(settings, Objects(train=rows))
    task = policy.prompts.adapt(task)
    start = settings.run_dir / "step-0"
    policy.model.save_pretrained(start)
    policy.processor.save_pretrained(start)

    def reward(completions: list[list[dict]], row: list[int], **kwargs: Any) -> list[float | None]:
        texts = [completion[0]["content"] for completion in completions]
        return [task.score(t, examples[i]).total for t, i in zip(texts, row, strict=True)]

    used = range(min(len(examples), settings.optim.max_steps * settings.optim.prompts_per_step))
    rows = {
        "prompt": [[{"role": "user", "content": task.prompt(examples[i])}] for i in used],
        "image": [examples[i].images[0].load() for i in used],
        "row": list(used),
    }
    optim, objective, rollout = settings.optim, settings.objective, settings.rollout
    config = GRPOConfig(
        output_dir=str(settings.run_dir),
        per_device_train_batch_size=optim.prompts_per_step * rollout.num_generations,
        num_generations=rollout.num_generations,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        max_steps=optim.max_steps,
        learning_rate=optim.lr,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        warmup_steps=int(optim.warmup_steps),
        lr_scheduler_type=optim.schedule,
        loss_type=objective.loss_type,
        epsilon=objective.epsilon,
        scale_rewards=objective.scale_rewards,
        beta=0.0,
        seed=settings.seed,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    saver = Saver(settings.run_dir, settings.evaluation.every)
    trainer = GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(start, dtype="float32"),
        processing_class=policy.processor,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict(rows),
        callbacks=[saver],
    )
    trainer.train()
    curve = {}
    for step in range(0, optim.max_steps + 1, settings.evaluation.every):
        folder = settings.run_dir / f"step-{step}"
        curve[step] = evaluate(settings.model_copy(update={"model": str(folder)})).rows
        shutil.rmtree(folder)
    return saver.seconds, curve
