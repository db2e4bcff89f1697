"""Sizes of a dataset's prompts for one model, counted without decoding images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from PIL import Image

from vlm_grpo.errors import UserError, bullets
from vlm_grpo.model.families import PixelBudget
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.planning.workload import PromptSize
from vlm_grpo.task import Task
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils.chat import Turn, place_images

MAX_COUNTED_EXAMPLES = 2000
"""Largest number of examples counted; they are spaced evenly over the dataset."""
MAX_PROCESSED_EXAMPLES = 200
"""The same if the image processor has to run, because its resizing is not known."""


class PromptCounter:
    """A counter of a dataset's prompt tokens under any pixel budget."""

    def __init__(self, examples: Sequence[Example], task: Task, prompts: PromptBuilder) -> None:
        self.family, self.chat, self.num_rows = prompts.family, prompts.chat, len(examples)
        self.processor = prompts.processor
        is_known = self.family.pixel_budget(self.processor) is not None
        most = MAX_COUNTED_EXAMPLES if is_known else MAX_PROCESSED_EXAMPLES
        self.examples = examples[:: -(-len(examples) // most)]
        self._text_tokens = [
            self._count_text_tokens(prompts.write(example, task), example.images)
            for example in self.examples
        ]
        self._process = cache(self._process)

    def _count_text_tokens(self, turns: Sequence[Turn], images: Sequence[ImageRef]) -> int:
        # Each image has one placeholder in the text; the times between a clip's frames are text.
        templated = self.chat.render(turns, (image.kind for image in images))
        texts = [templated, *(self.family.write_times(i, self.processor) for i in images)]
        counts = (len(self.processor.tokenizer(text)["input_ids"]) for text in texts if text)
        return sum(counts) - len(images)

    def count(self, budget: PixelBudget | None) -> list[PromptSize]:
        """Return the prompt sizes in ascending order of tokens; without a pixel budget, the
        processor is run on blank images of each size."""
        sizes, problems = [], []
        for example, text_tokens in zip(self.examples, self._text_tokens, strict=True):
            images = example.images
            try:
                size = (
                    self._resize(images, budget)
                    if budget
                    else self._process(tuple(image.size for image in images))
                )
            except ValueError as error:
                problems.append(f"{example.id}: {error}")
                continue
            sizes.append(replace(size, tokens=text_tokens + size.image_tokens))
        if problems:
            raise UserError(f"the model cannot resize the images of:\n{bullets(problems)}")
        return sorted(sizes, key=lambda size: size.tokens)

    def _resize(self, images: Sequence[ImageRef], budget: PixelBudget) -> PromptSize:
        processor, seen, pixels = self.processor.image_processor, 0, 0
        for image in images:
            size = self.family.resized_size(image.size, budget.share(image), self.processor)
            # An image is repeated to fill a temporal patch.
            grid = math.ceil(max(1, image.num_frames) / processor.temporal_patch_size)
            seen += math.prod(size) * grid
            pixels += math.prod(size) * max(1, image.num_frames)
        tokens = seen // (processor.patch_size * processor.merge_size) ** 2
        return PromptSize(tokens, tokens, seen * 3 * processor.temporal_patch_size, pixels)

    def _process(self, images: Sequence[tuple[int, int]]) -> PromptSize:
        if not images:
            return PromptSize(0, 0, 0, 0)
        text = self.chat.render(place_images([Turn("user", "")], len(images)))
        inputs = self.processor(
            text=[text],
            images=[Image.new("RGB", size) for size in images],
            return_tensors="pt",
        )
        in_text = len(self.processor.tokenizer(text)["input_ids"]) - len(images)
        tokens = inputs["input_ids"].shape[1] - in_text
        pixels = sum(width * height for width, height in images)
        return PromptSize(tokens, tokens, inputs["pixel_values"].numel(), pixels)
