"""``vlm-grpo train`` and ``vlm-grpo sft``: train a model, and evaluate it before and after."""

from vlm_grpo.cli.common import Overrides, Recipe, exit_when_stopped
from vlm_grpo.errors import UserError


def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a model, and evaluate it before and after.

    \b
    vlm-grpo train quickstart
    vlm-grpo train grounding optim.lr=1e-4 rollout.num_generations=16
    vlm-grpo train counting policy.lora.r=16          LoRA adapters instead of full weights
    vlm-grpo train counting name=mine resume=true     resume a run that stopped
    vlm-grpo train counting_qwen2_vl_2b data.train=train.jsonl data.eval=test.jsonl
    vlm-grpo train my_task.py model=Qwen/Qwen2.5-VL-3B-Instruct data.train=train.jsonl
    vlm-grpo train recipe.yaml task=my_task.py
    accelerate launch -m vlm_grpo.cli train recipe.yaml

    The run's folder, runs/NAME, holds config.yaml, metrics.jsonl, samples/ and checkpoints/.
    """
    from vlm_grpo.config.recipes import load_settings

    settings = load_settings(recipe, overrides or [])
    with exit_when_stopped("finished checkpoints are kept (resume=true)"):
        from vlm_grpo.training import trainer

        trainer.train(settings)


UNUSED = (
    *("objective", "optim.lr", "optim.lr_vision", "optim.lr_projector", "optim.schedule"),
    *("optim.warmup_steps", "optim.min_lr", "optim.mini_batches", "rollout.sampler"),
    *("rollout.num_generations", "rollout.dynamic_sampling", "rollout.steps_ahead"),
    *("rollout.temperature", "rollout.vllm", "warm_start.steps"),
)
"""Settings, or blocks of them, that supervised steps do not read."""


def sft(recipe: Recipe, overrides: Overrides = None) -> None:
    """Fine-tune a model on gold answers, and evaluate it before and after.

    \b
    vlm-grpo sft counting warm_start.lr=1e-4 optim.max_steps=200
    vlm-grpo sft counting_qwen2_vl_2b data.train=train.jsonl policy.lora.r=16
    vlm-grpo sft my_task.py model=Qwen/Qwen2.5-VL-3B-Instruct data.train=solved.jsonl
    vlm-grpo sft counting resume=true                 resume a run that stopped

    Each row is trained on its column completion, or else on the gold answer that the task writes.
    The same as train with warm_start.steps=all; warm_start.steps=50 starts GRPO after 50 steps.
    The run's folder, runs/NAME-sft, has the layout of train's.
    """
    for override in overrides or []:
        key = override.partition("=")[0]
        if any(key == unused or key.startswith(f"{unused}.") for unused in UNUSED):
            raise UserError(
                f"{key} has no effect on supervised steps: remove it; their learning rate is "
                "warm_start.lr, and their number optim.max_steps"
            )
    train(recipe, [*(overrides or []), "warm_start.steps=all"])
