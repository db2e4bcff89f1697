"""Sizes of a dataset's prompts for one model, counted without decoding images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from PIL import Image

from vlm_grpo.errors import UserError, bullets
from vlm_grpo.families import Family, PixelBudget
from vlm_grpo.model.chat import ChatTemplate
from vlm_grpo.task import Task
from vlm_grpo.types import Example

MAX_COUNTED_EXAMPLES = 2000
"""Largest number of examples counted; they are spaced evenly over the dataset."""
MAX_PROCESSED_EXAMPLES = 200
"""The same if the image processor has to run, because its resizing is not known."""


@dataclass(frozen=True)
class PromptSize:
    """The size of one prompt.

    Attributes:
        tokens: number of tokens, including image tokens.
        image_tokens: number of image tokens.
        values: number of pixel values that the vision tower receives.
        pixels: number of pixels of the resized images.
    """

    tokens: int
    image_tokens: int
    values: int
    pixels: int


class PromptCounter:
    """A counter of a dataset's prompt tokens under any pixel budget.

    Args:
        examples: all examples of the dataset.
        task: builds the questions.
        family: computes the resized sizes.
        chat: the model's chat template, with its processor.
    """

    def __init__(
        self, examples: Sequence[Example], task: Task, family: Family, chat: ChatTemplate
    ) -> None:
        self.family, self.chat, self.num_rows = family, chat, len(examples)
        self.processor = chat.processor
        is_known = family.pixel_budget(self.processor) is not None
        most = MAX_COUNTED_EXAMPLES if is_known else MAX_PROCESSED_EXAMPLES
        self.examples = examples[:: -(-len(examples) // most)]
        self._text_tokens = [
            self._count_text_tokens(len(example.images), task.prompt(example))
            for example in self.examples
        ]
        self._process = cache(self._process)

    def _count_text_tokens(self, num_images: int, text: str) -> int:
        """Count the tokens without image tokens; each image has one placeholder in the text."""
        templated = self.chat.render(text, num_images)
        return len(self.processor.tokenizer(templated)["input_ids"]) - num_images

    def count(self, budget: PixelBudget | None) -> list[PromptSize]:
        """Return the prompt sizes in ascending order of tokens.

        Args:
            budget: the pixel budget; None: the processor is run on blank images of each size.

        Raises:
            UserError: the model cannot resize some images; the message names all of them.
        """
        sizes, problems = [], []
        for example, text_tokens in zip(self.examples, self._text_tokens, strict=True):
            images = tuple(image.size for image in example.images)
            try:
                size = self._resize(images, budget) if budget else self._process(images)
            except ValueError as error:
                problems.append(f"{example.id}: {error}")
                continue
            sizes.append(replace(size, tokens=text_tokens + size.image_tokens))
        if problems:
            raise UserError(f"the model cannot resize the images of:\n{bullets(problems)}")
        return sorted(sizes, key=lambda size: size.tokens)

    def _resize(self, images: Sequence[tuple[int, int]], budget: PixelBudget) -> PromptSize:
        resized = [self.family.resized_size(size, budget, self.processor) for size in images]
        pixels = sum(width * height for width, height in resized)
        processor = self.processor.image_processor
        tokens = pixels // (processor.patch_size * processor.merge_size) ** 2
        return PromptSize(tokens, tokens, pixels * 3 * processor.temporal_patch_size, pixels)

    def _process(self, images: Sequence[tuple[int, int]]) -> PromptSize:
        if not images:
            return PromptSize(0, 0, 0, 0)
        inputs = self.processor(
            text=[self.chat.render("", len(images))],
            images=[Image.new("RGB", size) for size in images],
            return_tensors="pt",
        )
        tokens = inputs["input_ids"].shape[1] - self._count_text_tokens(len(images), "")
        pixels = sum(width * height for width, height in images)
        return PromptSize(tokens, tokens, inputs["pixel_values"].numel(), pixels)
