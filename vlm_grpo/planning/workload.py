"""The workload of one step on one device: numbers of prompts, tokens and micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from vlm_grpo.config.run import Settings
from vlm_grpo.engine.batch import GroupSlice, MicroBatch, pack
from vlm_grpo.types import Example, Prompt


@dataclass(frozen=True)
class Workload:
    """One step on one device, with equal prompts.

    Attributes:
        num_prompts: prompts per step on this device.
        num_generations: completions per prompt, G.
        prompt_tokens: tokens per prompt.
        patches: image patches per prompt, before merging.
        completion_tokens: tokens per completion.
        rollout_budget: largest number of tokens generated at once.
        update_budget: largest number of tokens in a micro-batch of the update.
        head_chunk_tokens: tokens whose logits are computed at once in the update; 0: all.
        iterations: updates per rollout.
        uses_reference: whether the reference policy computes log-probabilities.
        image_pixels: pixels of a prompt's resized images.
    """

    num_prompts: int
    num_generations: int
    prompt_tokens: int
    patches: int
    completion_tokens: int
    rollout_budget: int
    update_budget: int
    head_chunk_tokens: int
    iterations: int = 1
    uses_reference: bool = False
    image_pixels: int = 0

    @property
    def concurrent_prompts(self) -> int:
        """Number of prompts that are decoded at once."""
        row = self.prompt_tokens + self.num_generations * self.completion_tokens
        return min(self.num_prompts, max(1, self.rollout_budget // row))

    @property
    def prefill_prompts(self) -> int:
        """Number of prompts in one prefill pass."""
        return min(self.concurrent_prompts, max(1, self.rollout_budget // self.prompt_tokens))

    @cached_property
    def _batches(self) -> list[MicroBatch]:
        """The micro-batches of the update."""
        prompt = Prompt(Example("", (), "", None), "", (0,) * self.prompt_tokens, {})
        rows = tuple(range(self.num_generations))
        completions = ((0,) * self.completion_tokens,) * self.num_generations
        return pack([GroupSlice(prompt, completions, rows)] * self.num_prompts, self.update_budget)

    @property
    def num_micro_batches(self) -> int:
        return len(self._batches)

    @property
    def micro_tokens(self) -> int:
        """Largest number of tokens in a micro-batch."""
        return max(batch.num_tokens for batch in self._batches)

    @property
    def micro_prompt_tokens(self) -> int:
        """Largest number of prompt tokens in a micro-batch."""
        return self._micro_prompts * self.prompt_tokens

    @property
    def micro_patches(self) -> int:
        """Largest number of image patches in a micro-batch."""
        return self._micro_prompts * self.patches

    @property
    def micro_completion_tokens(self) -> int:
        """Largest number of completion tokens in a micro-batch."""
        return max(len(batch.rows) for batch in self._batches) * self.completion_tokens

    @property
    def update_tokens(self) -> int:
        """Tokens in all micro-batches; a group split over several repeats its prompt in each."""
        return sum(batch.num_tokens for batch in self._batches)

    @property
    def _micro_prompts(self) -> int:
        return max(len(batch.slices) for batch in self._batches)


def estimate_workload(
    settings: Settings, prompt_tokens: int, patches: int, image_pixels: int, devices: int = 1
) -> Workload:
    """Return the workload of a step under a recipe's settings.

    Args:
        prompt_tokens: tokens per prompt, including image tokens.
        patches: image patches per prompt.
        image_pixels: pixels of a prompt's resized images.
        devices: number of devices among which the prompts are divided.
    """
    rollout, optim = settings.rollout, settings.optim
    return Workload(
        num_prompts=math.ceil(optim.prompts_per_step / devices),
        num_generations=rollout.num_generations,
        prompt_tokens=prompt_tokens,
        patches=patches,
        completion_tokens=rollout.max_completion_length,
        rollout_budget=rollout.max_tokens_per_batch,
        update_budget=optim.max_tokens_per_batch,
        head_chunk_tokens=settings.policy.head_chunk_tokens,
        iterations=settings.objective.num_iterations,
        uses_reference=settings.objective.needs_reference,
        image_pixels=image_pixels,
    )
