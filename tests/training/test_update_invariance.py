"""The gradient of a step depends neither on its micro-batches nor on the order of completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from groups import make_advantages
from tiny_models import make_prompt, noise_example, tiny_policy
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.dist.data_parallel import DataParallel
from vlm_grpo.model.engine.batch import pack
from vlm_grpo.model.policy import Policy
from vlm_grpo.training.batch import Rollout, StepBatch, build_slices, pack_step, score_slices
from vlm_grpo.training.memory import TokenBudget
from vlm_grpo.training.methods import Run, build_methods
from vlm_grpo.training.update import Updater
from vlm_grpo.types import Completion, Group, Score

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
LENGTHS = ((9, 1, 4, 7), (2, 9, 3, 5))
MAX_LENGTH = 9
MICRO_BATCHES = {"token": (1, 4), "sequence": (2, 8)}
"""Numbers of micro-batches by the level of the ratios."""
STEP_SIZE = 0.01
"""Size of a random step: large enough that ratios reach the clip and the KL is not 0."""
WEIGHT_SCALE = 0.5
"""Scale of the random weights, so that rounding changes the gradient by less than 1e-6."""


class GradientRecorder(torch.optim.SGD):
    """An optimizer that keeps each gradient as one vector and takes random steps instead.

    The second update then starts from a bit-identical policy, whatever the rounding of the first
    gradient.
    """

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self.gradients: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        weights = self.param_groups[0]["params"]
        self.gradients.append(torch.cat([weight.grad.flatten() for weight in weights]))
        take_random_step(weights, seed=4)


@torch.no_grad()
def take_random_step(weights: Sequence[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.add_(STEP_SIZE * torch.randn(weight.shape, generator=generator))


def make_settings(**objective: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": "counting",
            "data": {"train": "embedded:counting"},
            "objective": objective,
            "rollout": {"max_completion_length": MAX_LENGTH},
            "optim": {"max_grad_norm": 0},
        }
    )


def make_groups(policy: Policy) -> list[Group]:
    """Build two groups of four completions; ``add_sampler_logprobs`` sets their log-probs."""
    generator = torch.Generator().manual_seed(0)
    examples = [noise_example("a", [(60, 90)], seed=1), noise_example("b", [(84, 56)], seed=2)]
    groups = []
    for example, lengths in zip(examples, LENGTHS, strict=True):
        prompt = make_prompt(policy, example)
        completions = []
        for length in lengths:
            ids = tuple(torch.randint(0, 256, (length,), generator=generator).tolist())
            completions.append(Completion(ids, (0.0,) * length, "", "eos"))
        scores = tuple(Score(None, {}, 0.0, {}) for _ in lengths)
        groups.append(Group(prompt, tuple(completions), scores))
    return groups


def add_sampler_logprobs(groups: list[Group], logprobs: Sequence[Tensor]) -> list[Group]:
    """Return the groups with sampler log-probs that differ from the policy's by 0.3 nats (std)."""
    generator = torch.Generator().manual_seed(1)
    result, rows = [], iter(logprobs)
    for group in groups:
        members = []
        for completion in group.completions:
            exact = next(rows)
            noise = 0.3 * torch.randn(len(exact), generator=generator)
            members.append(replace(completion, logprobs=tuple((exact + noise).tolist())))
        result.append(replace(group, completions=tuple(members)))
    return result


def shuffle(groups: list[Group], advantages: Tensor, seed: int) -> tuple[list[Group], Tensor]:
    """Shuffle the groups and the completions in each, with their advantages."""
    generator = torch.Generator().manual_seed(seed)
    shuffled, parts = [], []
    for index in torch.randperm(len(groups), generator=generator).tolist():
        group, size = groups[index], len(groups[index].completions)
        order = torch.randperm(size, generator=generator).tolist()
        members = tuple(group.completions[i] for i in order)
        shuffled.append(Group(group.prompt, members, group.scores))
        parts.append(advantages[[index * size + i for i in order]])
    return shuffled, torch.cat(parts)


def find_token_budget(batch: StepBatch, count: int) -> int:
    """Find the largest token budget that splits the step into ``count`` micro-batches."""
    total = sum(piece.num_tokens for piece in batch.slices)
    return next(n for n in range(total, 0, -1) if len(pack(batch.slices, n)) == count)


def compute_gradients(settings: Settings, count: int, order: int | None = None) -> list[Tensor]:
    """Compute the gradient of each of the step's updates, split into ``count`` micro-batches."""
    policy = tiny_policy("qwen2_5_vl")
    accelerator = Accelerator(cpu=True)
    weights = [weight for _, weight in policy.trainable_parameters()]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(WEIGHT_SCALE if weight.dim() >= 2 else 1.0)
    optimizer = GradientRecorder(weights)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    strategy = DataParallel(policy, accelerator)
    strategy.attach_optimizer(optimizer, max_norm=math.inf)
    methods, budget = build_methods(settings), TokenBudget(10_000, "optim")
    for method in methods.values():
        method.start(Run(settings, strategy, ExampleStream([], 0)))
    take_random_step(weights, seed=3)  # the policy is no longer the reference
    updater = Updater(strategy, constant, settings, budget, methods=methods)
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(sum(len(part) for part in LENGTHS), generator=generator)
    groups = make_groups(policy)
    slices, layout = build_slices(groups, [True] * len(advantages)), Rollout(tuple(groups)).layout
    exact = score_slices(policy, slices, layout, 10_000)
    groups = add_sampler_logprobs(groups, layout.split(exact))
    if order is not None:
        groups, advantages = shuffle(groups, advantages, order)
    rollout = Rollout(tuple(groups), step=1)
    scores, own = updater.score(rollout), make_advantages(advantages)
    batch = pack_step(rollout, scores, own, methods, settings, accelerator)
    updater.budget.tokens = find_token_budget(batch, count)
    updater.update(batch)
    return optimizer.gradients


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_neither_the_split_nor_the_order_changes_the_gradient(loss_type: str, level: str) -> None:
    """Every term of the loss, in two updates: one to eight micro-batches, each in another order."""
    settings = make_settings(
        loss_type=loss_type,
        epsilon_high=5.0 if loss_type == "cispo" else None,
        importance_sampling_level=level,
        num_iterations=2,
        beta=0.1,
        reference_refresh_every="never",
        entropy_coef=0.01,
        sampler_correction="token",
    )
    unsplit = compute_gradients(settings, 1)
    assert len(unsplit) == 2
    assert (unsplit[0] - unsplit[1]).norm() > 0.1 * unsplit[0].norm()  # the updates differ
    for count in MICRO_BATCHES[level]:
        split = compute_gradients(settings, count, order=count)
        for gradient, expected in zip(split, unsplit, strict=True):
            # float32, summed in another order; the largest difference measured is 7e-7.
            assert (gradient - expected).norm() < 1e-6 * expected.norm()
