"""How long a dataset's prompts are for one model, counted without decoding an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlm_grpo.errors import UserError, bullets
from vlm_grpo.families import Family, PixelBudget
from vlm_grpo.task import Task
from vlm_grpo.types import Example

COUNTED = 2000
"""Rows that are counted, evenly chosen among all."""


@dataclass(frozen=True)
class PromptSize:
    """One prompt.

    Attributes:
        tokens: all of it.
        image_tokens: those of its images.
        patches: of its images, before they are merged.
        pixels: of its images as the model sees them.
    """

    tokens: int
    image_tokens: int
    patches: int
    pixels: int


class Prompts:
    """The prompts of a dataset, to be counted under any pixel budget.

    Args:
        examples: the whole dataset.
        task: words the questions.
        family: resizes the images.
        processor: the model's.
    """

    def __init__(
        self, examples: Sequence[Example], task: Task, family: Family, processor: Any
    ) -> None:
        self.family, self.processor, self.rows = family, processor, len(examples)
        step = max(1, len(examples) // COUNTED)
        self.examples = examples[::step][:COUNTED]
        self._text = [self._text_tokens(example, task) for example in self.examples]

    def _text_tokens(self, example: Example, task: Task) -> int:
        """Tokens besides those of the images, each of which has one placeholder in the text."""
        content: list[dict[str, str]] = [{"type": "image"} for _ in example.images]
        content.append({"type": "text", "text": task.prompt(example)})
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return len(self.processor.tokenizer(text)["input_ids"]) - len(example.images)

    def sizes(self, budget: PixelBudget) -> list[PromptSize]:
        """The prompts under a pixel budget, shortest first.

        Raises:
            UserError: there are images that the model's resize cannot take; all are named.
        """
        reader = self.processor.image_processor
        found, problems = [], []
        for example, text in zip(self.examples, self._text, strict=True):
            try:
                seen = [
                    self.family.resized_size(i.size, budget, self.processor) for i in example.images
                ]
            except ValueError as error:
                problems.append(f"{example.id}: {error}")
                continue
            pixels = sum(width * height for width, height in seen)
            patches = pixels // reader.patch_size**2
            tokens = patches // reader.merge_size**2
            found.append(PromptSize(text + tokens, tokens, patches, pixels))
        if problems:
            raise UserError(f"the model cannot see the images of:\n{bullets(problems)}")
        return sorted(found, key=lambda size: size.tokens)
