"""Loss, gradient and token accuracy of a supervised step equal those of TRL's SFTTrainer; it gets
texts and images, and tokenizes, prepares, pads and labels them itself."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from gradients import relative_distance
from small_runs import make_embedded_trainer
from steps import capture_step, record_updates
from torch import Tensor
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model.loading import load_model
from vlm_grpo.types import Prompt

Pairs = list[tuple[Prompt, str]]
Measured = tuple[float, float, dict[str, Tensor]]


def step_ours(trainer: Any) -> tuple[Pairs, Measured]:
    """Make one step; return the prompts with answers, the loss, the accuracy and the gradient."""
    with pytest.MonkeyPatch.context() as patch:
        _, gradients = record_updates(patch, trainer.strategy)
        metrics, rollout, _ = capture_step(trainer)
    pairs = [(group.prompt, c.text) for group in rollout.groups for c in group.completions]
    return pairs, (metrics["loss"], metrics["mean_token_accuracy"], gradients[0])


def step_trls(pairs: Pairs, model: Any, processor: Any, folder: Path) -> Measured:
    rows = [
        {
            "prompt": prompt.text,
            "completion": f"{answer}<|im_end|>",
            "images": [image.load() for image in prompt.example.images],
        }
        for prompt, answer in pairs
    ]
    off: Any = {"max_length": None, "bf16": False, "gradient_checkpointing": False, "report_to": []}
    size = len(rows)
    settings = SFTConfig(str(folder), per_device_train_batch_size=size, use_cpu=True, **off)
    data = Dataset.from_list(rows)
    trainer: Any = SFTTrainer(model, settings, train_dataset=data, processing_class=processor)
    model.train()
    batch = trainer.data_collator(rows)
    # Targets of several lengths, and prompts of several: both kinds of padding are compared.
    for is_counted in (batch["labels"] >= 0, batch["attention_mask"]):
        assert len({*is_counted.sum(1).tolist()}) > 1
    count = (batch["labels"] >= 0).sum()
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=count)
    loss.backward()
    trainer.log({})
    accuracy = trainer.state.log_history[-1]["mean_token_accuracy"]
    grads = {n: w.grad for n, w in model.named_parameters() if w.grad is not None}
    return loss.item(), accuracy, grads


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of TRL
@pytest.mark.parametrize("task", ["ocr", "grounding"])
def test_a_supervised_step_equals_that_of_trl(tmp_path, task):
    # Micro-batches of two or three prompts; TRL has one batch.
    data = f"task={task}", f"data.train=embedded:{task}", "optim.max_tokens_per_batch=180"
    warm = "warm_start.steps=1", "rollout.max_completion_length=32", "optim.prompts_per_step=6"
    trainer = make_embedded_trainer(tmp_path, *warm, *data, "optim.max_grad_norm=0")
    pairs, (loss, accuracy, gradients) = step_ours(trainer)
    assert len(pairs) == 6
    settings = load_settings("quickstart", ["policy.dtype=float32"])
    loaded = load_model(settings)
    expected = step_trls(pairs, loaded.model, loaded.prompts.processor, tmp_path)
    assert loss == pytest.approx(expected[0], abs=1e-5)
    assert accuracy == pytest.approx(expected[1], abs=1e-6)
    assert relative_distance(gradients, expected[2]) < 1e-5
