"""``vlm-grpo sft``: supervised fine-tuning on the gold answers of a recipe's data."""

from __future__ import annotations

from vlm_grpo.cli.common import Overrides, Recipe, RecipeTask
from vlm_grpo.cli.train import train
from vlm_grpo.errors import UserError

UNUSED = (
    *("objective", "optim.lr", "optim.lr_vision", "optim.lr_projector", "optim.schedule"),
    *("optim.warmup_steps", "optim.min_lr", "optim.mini_batches", "rollout.sampler"),
    *("rollout.num_generations", "rollout.dynamic_sampling", "rollout.steps_ahead"),
    *("rollout.temperature", "rollout.vllm", "warm_start.steps"),
)
"""Settings, or blocks of them, that supervised steps do not read."""


def sft(recipe: Recipe, overrides: Overrides = None, task: RecipeTask = None) -> None:
    """Fine-tune a model on gold answers, and evaluate it before and after.

    \b
    vlm-grpo sft counting warm_start.lr=1e-4 optim.max_steps=200
    vlm-grpo sft counting_qwen2_vl_2b data.train=train.jsonl policy.lora.r=16
    vlm-grpo sft my_task.py model=Qwen/Qwen2.5-VL-3B-Instruct data.train=solved.jsonl
    vlm-grpo sft counting resume=true                 resume a run that stopped

    Each row is trained on its column completion, or else on the gold answer that the task writes.
    The same as train with warm_start.steps=all; warm_start.steps=50 starts GRPO after 50 steps.
    The run's folder, runs/NAME-sft, holds what that of train holds.
    """
    for override in overrides or []:
        key = override.partition("=")[0]
        if any(key == unused or key.startswith(f"{unused}.") for unused in UNUSED):
            raise UserError(
                f"{key} has no effect on supervised steps: remove it; their learning rate is "
                "warm_start.lr, and their number optim.max_steps"
            )
    train(recipe, [*(overrides or []), "warm_start.steps=all"], task)
