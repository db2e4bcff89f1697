"""Loss and gradient of an update equal those of TRL's GRPOTrainer on the same completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from gradients import relative_distance
from tiny_models import make_prompt, noise_example, tiny_model, tiny_policy
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.training.objective import StepTotals, TokenBatch, group_advantages, policy_loss
from vlm_grpo.types import Prompt

GENERATIONS, MAX_LENGTH = 4, 9
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.25, 0.25, 1.0, 0.0]


def make_slices(prompts: list[Prompt]) -> list[GroupSlice]:
    generator = torch.Generator().manual_seed(0)
    slices = []
    for index, prompt in enumerate(prompts):
        lengths = torch.randint(1, MAX_LENGTH + 1, (GENERATIONS,), generator=generator).tolist()
        completions = tuple(
            tuple(torch.randint(0, 256, (n,), generator=generator).tolist()) for n in lengths
        )
        rows = tuple(range(index * GENERATIONS, (index + 1) * GENERATIONS))
        slices.append(GroupSlice(prompt, completions, rows))
    return slices


def compute_ours(rewards: Tensor) -> tuple[float, dict[str, Tensor]]:
    # TRL scores over the full vocabulary, so no token is banned here either.
    policy = tiny_policy("qwen2_5_vl", banned=())
    batch = MicroBatch(tuple(make_slices(make_prompts(policy))))
    scores = policy.score(batch)
    lengths = torch.tensor([len(c) for c in batch.completions])
    ids = torch.arange(len(rewards)) // GENERATIONS
    tokens = TokenBatch(
        scores.logprobs,
        torch.arange(len(lengths)).repeat_interleave(lengths),
        group_advantages(rewards, ids).values,
        lengths,
    )
    settings = ObjectiveSettings.model_validate({"loss_type": "grpo"})
    loss = policy_loss(tokens, StepTotals.from_lengths(lengths, None, MAX_LENGTH), settings).loss
    loss.backward()
    return loss.item(), {n: w.grad for n, w in policy.trainable_parameters() if w.grad is not None}


def make_prompts(policy: Any) -> list[Prompt]:
    examples = [
        noise_example("a", [(60, 90)], seed=1),
        noise_example("b", [(84, 56)], "And where is it?", seed=2),
    ]
    return [make_prompt(policy, example) for example in examples]


def compute_trls(rewards: Tensor, folder: Path) -> tuple[float, dict[str, Tensor]]:
    model, processor = tiny_model("qwen2_5_vl")
    trainer = GRPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(rewards),
            num_generations=GENERATIONS,
            max_completion_length=MAX_LENGTH,
            loss_type="grpo",
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["?"] * 8}),
    )
    slices = make_slices(make_prompts(tiny_policy("qwen2_5_vl")))
    rows = [(s.prompt, c) for s in slices for c in s.completions]
    completions = [torch.tensor(c) for _, c in rows]

    def left_padded(values: list[Tensor]) -> Tensor:
        return pad_sequence(values, batch_first=True, padding_side="left")

    prompt_ids = left_padded([torch.tensor(p.token_ids) for p, _ in rows])
    completion_ids = pad_sequence(completions, batch_first=True)
    types = left_padded([p.vision["mm_token_type_ids"][0] for p, _ in rows])
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": left_padded([torch.ones(len(p.token_ids)).long() for p, _ in rows]),
        "completion_ids": completion_ids,
        "completion_mask": pad_sequence([torch.ones_like(c) for c in completions], True),
        "pixel_values": torch.cat([p.vision["pixel_values"] for p, _ in rows]),
        "image_grid_thw": torch.cat([p.vision["image_grid_thw"] for p, _ in rows]),
        "num_images": [1] * len(rows),
        "mm_token_type_ids": torch.nn.functional.pad(types, (0, completion_ids.shape[1])),
        "num_items_in_batch": sum(len(c) for c in completions),
        # As TRL computes them: mean and deviation over each prompt's generations.
        "advantages": torch.cat(
            [(r - r.mean()) / (r.std() + 1e-4) for r in rewards.split(GENERATIONS)]
        ),
    }
    # Prompts of two lengths and ragged completions: both kinds of padding are in the comparison.
    assert len({len(prompt.token_ids) for prompt, _ in rows}) == 2
    assert completion_ids.shape == (len(rows), MAX_LENGTH)
    assert inputs["mm_token_type_ids"].shape[1] == prompt_ids.shape[1] + MAX_LENGTH
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)  # noqa: SLF001
    loss.backward()
    return loss.item(), {n: w.grad for n, w in model.named_parameters() if w.grad is not None}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from TRL's use of transformers
def test_loss_and_gradient_equal_those_of_trl(tmp_path: Path) -> None:
    rewards = torch.tensor(REWARDS)
    loss, grads = compute_ours(rewards)
    expected_loss, expected = compute_trls(rewards, tmp_path)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert relative_distance(grads, expected) < 1e-5
