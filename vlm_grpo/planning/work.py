"""What one step has to do on one device: how many tokens go through which part, and how often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from vlm_grpo.config.run import Settings
from vlm_grpo.engine.batch import GroupSlice, MicroBatch, pack
from vlm_grpo.types import Example, Prompt


@dataclass(frozen=True)
class Work:
    """One step on one device, all of its prompts alike.

    Attributes:
        prompts: prompts of the step on this device.
        group: completions of each, G.
        prompt: tokens of a prompt.
        patches: patches of its images, before they are merged.
        completion: tokens of a completion.
        rollout_budget: tokens that are generated at once.
        update_budget: tokens of a micro-batch of the update.
        chunk: tokens whose logits are held at once in the update.
        iterations: updates on one rollout.
        reference: the reference policy is asked for log-probabilities.
        image_pixels: pixels of a prompt's images as the model sees them.
    """

    prompts: int
    group: int
    prompt: int
    patches: int
    completion: int
    rollout_budget: int
    update_budget: int
    chunk: int
    iterations: int = 1
    reference: bool = False
    image_pixels: int = 0

    @property
    def slots(self) -> int:
        """Prompts that are decoded at once."""
        row = self.prompt + self.group * self.completion
        return min(self.prompts, max(1, self.rollout_budget // row))

    @property
    def prefill(self) -> int:
        """Prompts whose one pass is made together."""
        return min(self.slots, max(1, self.rollout_budget // self.prompt))

    @cached_property
    def _batches(self) -> list[MicroBatch]:
        """The micro-batches that the update will make."""
        prompt = Prompt(Example("", (), "", None), "", (0,) * self.prompt, {})
        rows = tuple(range(self.group))
        piece = GroupSlice(prompt, ((0,) * self.completion,) * self.group, rows)
        return pack([piece] * self.prompts, self.update_budget)

    @property
    def micro_batches(self) -> int:
        return len(self._batches)

    @property
    def micro_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        return max(batch.num_tokens for batch in self._batches)

    @property
    def micro_prompt_tokens(self) -> int:
        """The most prompt tokens of a micro-batch."""
        return self._prompts_together * self.prompt

    @property
    def micro_patches(self) -> int:
        """The most patches of a micro-batch's images."""
        return self._prompts_together * self.patches

    @property
    def micro_completion_tokens(self) -> int:
        """The most completion tokens of a micro-batch."""
        return max(len(batch.rows) for batch in self._batches) * self.completion

    @property
    def update_tokens(self) -> int:
        """Tokens of all micro-batches; a group that is cut repeats its prompt."""
        return sum(batch.num_tokens for batch in self._batches)

    @property
    def _prompts_together(self) -> int:
        return max(len(batch.slices) for batch in self._batches)


def estimate_work(
    settings: Settings, prompt: int, patches: int, image_pixels: int, devices: int = 1
) -> Work:
    """The work of a step under a recipe's settings.

    Args:
        prompt: tokens of a prompt, those of its images included.
        patches: of its images.
        image_pixels: of its images as the model sees them.
        devices: among which the prompts are divided.
    """
    rollout, optim = settings.rollout, settings.optim
    return Work(
        prompts=math.ceil(optim.prompts_per_step / devices),
        group=rollout.num_generations,
        prompt=prompt,
        patches=patches,
        completion=rollout.max_completion_length,
        rollout_budget=rollout.max_tokens_per_batch,
        update_budget=optim.max_tokens_per_batch,
        chunk=settings.policy.head_chunk_tokens,
        iterations=settings.objective.num_iterations,
        reference=settings.objective.needs_reference,
        image_pixels=image_pixels,
    )
