"""The workload of one step on one device: numbers of prompts, tokens and micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from vlm_grpo.config.optim import OptimizerName
from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.config.run import Settings
from vlm_grpo.model.engine.batch import PREFILL_TOKENS, GroupSlice, pack
from vlm_grpo.planning.shape import ModelShape
from vlm_grpo.types import Example, Prompt


@dataclass(frozen=True)
class PromptSize:
    """The size of one prompt."""

    tokens: int  # including image tokens
    image_tokens: int
    values: int  # pixel values that the vision tower receives
    pixels: int


@dataclass(frozen=True)
class Workload:
    """One step on one device, with equal prompts.

    In the repeated form each completion has a copy of the prompt: its step is that of G times as
    many prompts with one completion each, except for its micro-batches.
    """

    num_prompts: int  # per step on this device, counting copies
    num_generations: int  # completions per copy of a prompt: G, and 1 in the repeated form
    prompt_tokens: int
    patches: int  # image patches per prompt, before merging
    completion_tokens: int
    rollout_budget: int  # largest number of tokens generated at once
    update_budget: int  # the same in a micro-batch of the update
    head_chunk_tokens: int  # tokens whose logits are computed at once in the update; 0: all
    iterations: int = 1
    uses_reference: bool = False
    image_pixels: int = 0  # of a prompt's resized images
    copies: int = 1  # of each prompt: 1, and G in the repeated form
    optimizer: OptimizerName = "adamw"
    mini_batches: int = 1
    teacher_weights: int = 0  # number of weights of the models of methods; 0: there is none
    extra_passes: int = 0  # of all completions for other images, as methods make
    views: int = 1  # forms of a prompt that a group is sampled for: with some methods more than 1

    @property
    def num_groups(self) -> int:
        return self.num_prompts // self.copies

    @property
    def concurrent_prompts(self) -> int:
        row = self.views * self.prompt_tokens + self.num_generations * self.completion_tokens
        return min(self.num_prompts, max(1, self.rollout_budget // row))

    @property
    def prefill_prompts(self) -> int:
        most = self.concurrent_prompts
        return most if self.copies > 1 else min(most, max(1, PREFILL_TOKENS // self.prompt_tokens))

    @cached_property
    def _batches(self) -> list[tuple[int, int]]:
        """The numbers of prompts, counting copies, and of completions in each micro-batch of a
        mini-batch."""
        prompt = Prompt(Example("", (), "", None), "", (0,) * self.prompt_tokens, {})
        rows = tuple(range(self.num_generations * self.copies))
        completion = (0,) * self.completion_tokens
        group = GroupSlice(prompt, (completion,) * len(rows), rows)
        batches = pack([group] * math.ceil(self.num_groups / self.mini_batches), self.update_budget)
        sizes = [(len(batch.slices), len(batch.rows)) for batch in batches]
        return sizes if self.copies == 1 else [(rows, rows) for _, rows in sizes]

    def _count_tokens(self, prompts: int, completions: int) -> int:
        return prompts * self.prompt_tokens + completions * (self.completion_tokens - 1)

    @property
    def num_micro_batches(self) -> int:
        return self.mini_batches * len(self._batches)

    @property
    def micro_tokens(self) -> int:
        return max(self._count_tokens(*batch) for batch in self._batches)

    @property
    def micro_prompt_tokens(self) -> int:
        return self._micro_prompts * self.prompt_tokens

    @property
    def micro_rows(self) -> tuple[int, int, int]:
        """Arguments of ``LayerBytes.count`` for the largest micro-batch."""
        return self.micro_tokens, self.micro_prompt_tokens, self.num_generations

    @property
    def micro_patches(self) -> int:
        return self._micro_prompts * self.patches

    @property
    def micro_completion_tokens(self) -> int:
        return max(completions for _, completions in self._batches) * self.completion_tokens

    @property
    def update_tokens(self) -> int:
        """Tokens in all micro-batches; a group split over several repeats its prompt in each."""
        return self.mini_batches * sum(self._count_tokens(*batch) for batch in self._batches)

    @property
    def _micro_prompts(self) -> int:
        return max(prompts for prompts, _ in self._batches)


def estimate_workload(
    settings: Settings,
    prompt: PromptSize,
    model: ModelShape,
    devices: int = 1,
    teacher_weights: int = 0,
) -> Workload:
    """Return the workload of a step whose prompts are divided among devices."""
    rollout, optim = settings.rollout, settings.optim
    copies = 1 if model.shares_prompts else rollout.num_generations
    return Workload(
        num_prompts=math.ceil(optim.prompts_per_step / devices) * copies,
        num_generations=rollout.num_generations // copies,
        prompt_tokens=prompt.tokens,
        patches=prompt.values // model.vision.patch_values,
        completion_tokens=rollout.max_completion_length,
        rollout_budget=rollout.max_tokens_per_batch or DEFAULT_ROLLOUT_TOKENS,
        update_budget=optim.max_tokens_per_batch,
        head_chunk_tokens=settings.policy.head_chunk_tokens if model.shares_prompts else 0,
        iterations=settings.objective.num_iterations,
        uses_reference=settings.objective.needs_reference,
        image_pixels=prompt.pixels,
        copies=copies,
        optimizer=optim.name,
        mini_batches=optim.mini_batches,
        teacher_weights=teacher_weights,
        extra_passes=sum(own.extra_passes for own in settings.used_methods),
        views=1 + sum(own.extra_views for own in settings.used_methods),
    )
