"""Sizes of a dataset's prompts for one model, counted without decoding images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlm_grpo.errors import UserError, bullets
from vlm_grpo.families import Family, PixelBudget
from vlm_grpo.task import Task
from vlm_grpo.types import Example

MAX_COUNTED_EXAMPLES = 2000
"""Largest number of examples counted; they are spaced evenly over the dataset."""


@dataclass(frozen=True)
class PromptSize:
    """The size of one prompt.

    Attributes:
        tokens: number of tokens, including image tokens.
        image_tokens: number of image tokens.
        patches: number of image patches before merging.
        pixels: number of pixels of the resized images.
    """

    tokens: int
    image_tokens: int
    patches: int
    pixels: int


class PromptCounter:
    """A counter of a dataset's prompt tokens under any pixel budget.

    Args:
        examples: all examples of the dataset.
        task: builds the questions.
        family: computes the resized sizes.
        processor: the model's processor.
    """

    def __init__(
        self, examples: Sequence[Example], task: Task, family: Family, processor: Any
    ) -> None:
        self.family, self.processor, self.num_rows = family, processor, len(examples)
        step = max(1, len(examples) // MAX_COUNTED_EXAMPLES)
        self.examples = examples[::step][:MAX_COUNTED_EXAMPLES]
        self._text_tokens = [self._count_text_tokens(example, task) for example in self.examples]

    def _count_text_tokens(self, example: Example, task: Task) -> int:
        """Count the tokens without image tokens; each image has one placeholder in the text."""
        content: list[dict[str, str]] = [{"type": "image"} for _ in example.images]
        content.append({"type": "text", "text": task.prompt(example)})
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return len(self.processor.tokenizer(text)["input_ids"]) - len(example.images)

    def count(self, budget: PixelBudget) -> list[PromptSize]:
        """Return the prompt sizes under a pixel budget, in ascending order of tokens.

        Raises:
            UserError: the model cannot resize some images; the message names all of them.
        """
        image_processor = self.processor.image_processor
        sizes, problems = [], []
        for example, text_tokens in zip(self.examples, self._text_tokens, strict=True):
            try:
                resized = [
                    self.family.resized_size(i.size, budget, self.processor) for i in example.images
                ]
            except ValueError as error:
                problems.append(f"{example.id}: {error}")
                continue
            pixels = sum(width * height for width, height in resized)
            patches = pixels // image_processor.patch_size**2
            tokens = patches // image_processor.merge_size**2
            sizes.append(PromptSize(text_tokens + tokens, tokens, patches, pixels))
        if problems:
            raise UserError(f"the model cannot resize the images of:\n{bullets(problems)}")
        return sorted(sizes, key=lambda size: size.tokens)
