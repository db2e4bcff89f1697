"""``vlm-grpo train``: train a model, and evaluate it before and after."""

from __future__ import annotations

from vlm_grpo.cli.common import (
    Overrides,
    Recipe,
    RecipeTask,
    add_task_override,
    exit_when_stopped,
)


def train(recipe: Recipe, overrides: Overrides = None, task: RecipeTask = None) -> None:
    """Train a model, and evaluate it before and after.

    \b
    vlm-grpo train quickstart
    vlm-grpo train grounding optim.lr=1e-4 rollout.num_generations=16
    vlm-grpo train counting policy.lora.r=16          LoRA adapters instead of full weights
    vlm-grpo train counting name=mine resume=true     resume a run that stopped
    vlm-grpo train counting_qwen2_vl_2b data.train=train.jsonl data.eval=test.jsonl
    vlm-grpo train my_task.py model=Qwen/Qwen2.5-VL-3B-Instruct data.train=train.jsonl
    vlm-grpo train recipe.yaml --task my_task.py
    accelerate launch -m vlm_grpo.cli train recipe.yaml

    The run's folder, runs/NAME, holds config.yaml, metrics.jsonl, samples/ and checkpoints/.
    """
    from vlm_grpo.config.recipes import load_settings

    settings = load_settings(recipe, add_task_override(overrides, task))
    with exit_when_stopped("finished checkpoints are kept (resume=true)"):
        from vlm_grpo.training import trainer

        trainer.train(settings)
