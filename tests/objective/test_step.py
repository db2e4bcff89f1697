"""One step through a real model and the Updater: its gradient knows neither cut nor order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tiny_models import noise_example, tiny_policy
from torch import Tensor

from vlm_grpo.config.run import Settings
from vlm_grpo.distributed.fsdp import DataParallel
from vlm_grpo.engine.batch import pack
from vlm_grpo.grpo.reference import Reference
from vlm_grpo.grpo.update import StepBatch, Updater, Updates, build_slices, step_batch
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Group, Prompt, Score

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
LENGTHS = ((9, 1, 4, 7), (2, 9, 3, 5))
LONGEST = 9
CUTS = (1, 2, 4, 8)
MOVED = 0.01
"""Size of a random step: far enough that ratios reach the clip and the KL is no zero."""
CALM = 0.5
"""Random weights are shrunk by this, for a gradient whose own rounding is below 1e-6."""


class Plain(Task):
    """Asks the example's question as it stands."""


class Recorder(torch.optim.SGD):
    """Keeps each gradient that it is given, as one long vector, and moves the weights its own way.

    The second update then finds the same policy to the last bit, whatever rounding did to the
    first one's gradient.
    """

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self.gradients: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        weights = self.param_groups[0]["params"]
        self.gradients.append(torch.cat([weight.grad.flatten() for weight in weights]))
        move(weights, seed=4)


@torch.no_grad()
def move(weights: Sequence[Tensor], seed: int) -> None:
    """A random step of every weight."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.add_(MOVED * torch.randn(weight.shape, generator=generator))


def settings_of(**objective: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": "counting",
            "data": {"train": "embedded:counting"},
            "objective": objective,
            "rollout": {"max_completion_length": LONGEST},
            "optim": {"max_grad_norm": 0},
        }
    )


def make_groups(policy: Policy) -> list[Group]:
    """Two prompts, four completions each; what the sampler thought of them comes later."""
    generator = torch.Generator().manual_seed(0)
    examples = [noise_example("a", [(60, 90)], seed=1), noise_example("b", [(84, 56)], seed=2)]
    groups = []
    for example, lengths in zip(examples, LENGTHS, strict=True):
        prompt: Prompt = policy.build_prompt(policy.with_resized_sizes(example), Plain())
        completions = []
        for length in lengths:
            ids = tuple(torch.randint(0, 256, (length,), generator=generator).tolist())
            completions.append(Completion(ids, (0.0,) * length, "", "eos"))
        scores = tuple(Score(None, {}, 0.0, {}) for _ in lengths)
        groups.append(Group(prompt, tuple(completions), scores))
    return groups


def from_a_sampler(groups: list[Group], logprobs: dict[int, Tensor]) -> list[Group]:
    """The groups with log-probs of a sampler some tenths of a nat off the policy's."""
    generator = torch.Generator().manual_seed(1)
    found, rows = [], iter(sorted(logprobs))
    for group in groups:
        members = []
        for completion in group.completions:
            exact = logprobs[next(rows)]
            noise = 0.3 * torch.randn(len(exact), generator=generator)
            members.append(replace(completion, logprobs=tuple((exact + noise).tolist())))
        found.append(replace(group, completions=tuple(members)))
    return found


def shuffled(groups: list[Group], advantages: Tensor, seed: int) -> tuple[list[Group], Tensor]:
    """The same completions with the same advantages, groups and members in another order."""
    generator = torch.Generator().manual_seed(seed)
    found, parts = [], []
    for index in torch.randperm(len(groups), generator=generator).tolist():
        group, size = groups[index], len(groups[index].completions)
        order = torch.randperm(size, generator=generator).tolist()
        members = tuple(group.completions[i] for i in order)
        found.append(Group(group.prompt, members, group.scores))
        parts.append(advantages[[index * size + i for i in order]])
    return found, torch.cat(parts)


def budget_for(batch: StepBatch, count: int) -> int:
    """The largest token budget under which the step falls into so many micro-batches."""
    total = sum(piece.num_tokens for piece in batch.slices)
    return next(n for n in range(total, 0, -1) if len(pack(batch.slices, n)) == count)


def gradients(settings: Settings, count: int, order: int | None = None) -> list[Tensor]:
    """The gradient of each of the step's updates, cut into ``count`` micro-batches."""
    policy = tiny_policy("qwen2_5_vl")
    accelerator = Accelerator(cpu=True)
    weights = [weight for _, weight in policy.trainable_parameters()]
    with torch.no_grad():
        for weight in weights:
            weight.mul_(CALM if weight.dim() >= 2 else 1.0)
    reference = Reference(policy.trainable_parameters(), settings.objective)
    move(weights, seed=3)  # the policy is no longer the reference
    optimizer = Recorder(weights)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    placement = DataParallel(policy, accelerator)
    placement.take(optimizer, max_norm=math.inf)
    updater = Updater(policy, placement, reference, constant, accelerator, settings, 10_000)
    generator = torch.Generator().manual_seed(5)
    advantages = torch.randn(sum(len(part) for part in LENGTHS), generator=generator)
    groups = make_groups(policy)
    everything = build_slices(groups, [True] * len(advantages))
    groups = from_a_sampler(groups, updater.logprobs(everything))
    if order is not None:
        groups, advantages = shuffled(groups, advantages, order)
    references, _ = updater.reference_pass(groups)
    batch = step_batch(groups, advantages, references, settings, accelerator)
    updater.max_tokens = budget_for(batch, count)
    updates = Updates()
    for _ in range(settings.objective.num_iterations):
        updater(batch, updates)
    return optimizer.gradients


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_neither_the_cut_nor_the_order_changes_a_steps_gradient(loss_type: str, level: str) -> None:
    """Every term of the loss, through two updates: cut into 1, 2, 4, 8, each in another order."""
    settings = settings_of(
        loss_type=loss_type,
        epsilon_high=5.0 if loss_type == "cispo" else None,
        importance_sampling_level=level,
        num_iterations=2,
        beta=0.1,
        reference_refresh_every="never",
        entropy_coef=0.01,
        sampler_correction="token",
    )
    whole = gradients(settings, 1)
    assert len(whole) == 2
    assert (whole[0] - whole[1]).norm() > 0.1 * whole[0].norm()  # two tests in one
    for count in CUTS:
        for mine, expected in zip(gradients(settings, count, order=count), whole, strict=True):
            # float32 and sums in another order; 7e-7 is the most that was seen.
            assert (mine - expected).norm() < 1e-6 * expected.norm()
