"""The sizes of a dataset's prompts, and of what their episodes observe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from PIL import Image

from vlm_grpo.errors import UserError, list_bad_rows
from vlm_grpo.model.families.family import PixelBudget
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.planning.sizes import PromptSize
from vlm_grpo.task import Task
from vlm_grpo.task.environment import Environment
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.task.rewards import FAILURES
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils.chat import IMAGE, Turn, place_images

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
        self._results = [self._preview(example, task) for example in self.examples]
        with EnvironmentRunner() as runner:
            self.examples = [_reset(example, task, runner) for example in self.examples]
        self._text_tokens = []
        for example in self.examples:
            turns, images = prompts.write(example, task), example.images
            templated = self.chat.render(turns, (image.kind for image in images))
            self._text_tokens.append(self._count_text_tokens(templated, images))
        self._process = cache(self._process)

    def _preview(self, example: Example, task: Task) -> tuple[int, int, list[ImageRef]] | None:
        """Return the number of results in an episode, and the text tokens and images of the
        longest; None: it has no environment."""
        environment = task.resolve(example)[1].environment
        if environment is None:
            return None
        try:
            parts = [*environment.preview(example)]
        except FAILURES as error:  # a user's method may raise anything
            raise UserError(f"{example.name}: preview failed: {error!r}") from error
        text = "".join(part if isinstance(part, str) else IMAGE for part in parts)
        images = [ImageRef("result", part, part) for part in parts if not isinstance(part, str)]
        tokens = self._count_text_tokens(self.chat.observe(text), images)
        return environment.max_turns - 1, tokens, images

    def _count_text_tokens(self, templated: str, images: Sequence[ImageRef]) -> int:
        # Each image has one placeholder in the text; the times between a clip's frames are text.
        texts = [templated, *(self.family.write_times(i, self.processor) for i in images)]
        counts = (len(self.processor.tokenizer(text)["input_ids"]) for text in texts if text)
        return sum(counts) - len(images)

    def count(self, budget: PixelBudget | None) -> list[PromptSize]:
        """Return the prompt sizes in ascending order of tokens; without a pixel budget, the
        processor is run on blank images of each size."""
        sizes, problems = [], []
        rows = zip(self.examples, self._text_tokens, self._results, strict=True)
        for example, text_tokens, shown in rows:
            try:
                size = self._measure(text_tokens, example.images, budget)
                if shown is not None:
                    found = self._measure(*shown[1:], budget)
                    size = replace(size, results=shown[0], result_tokens=found.tokens)
                    seen = {"result_images": found.image_tokens, "result_values": found.values}
                    size = replace(size, **seen)
                sizes.append(size)
            except ValueError as error:
                problems.append(f"{example.id}: {error}")
        if problems:
            listed = list_bad_rows(problems)
            raise UserError(f"the model cannot resize the images of:\n{listed}")
        return sorted(sizes, key=lambda s: s.tokens + s.results * s.result_tokens)

    def _measure(
        self, text_tokens: int, images: Sequence[ImageRef], budget: PixelBudget | None
    ) -> PromptSize:
        if budget:
            size = self._resize(images, budget)
        else:
            size = self._process(tuple(image.size for image in images))
        return replace(size, tokens=text_tokens + size.image_tokens)

    def _resize(self, images: Sequence[ImageRef], budget: PixelBudget) -> PromptSize:
        processor, tokens, seen, pixels = self.processor.image_processor, 0, 0, 0
        for image in images:
            size = self.family.resized_size(image.size, budget.share(image), self.processor)
            # An image is repeated to fill a temporal patch.
            grid = math.ceil(max(1, image.num_frames) / processor.temporal_patch_size)
            tokens += self.family.image_tokens(size, self.processor) * grid
            seen += math.prod(size) * grid
            pixels += math.prod(size) * max(1, image.num_frames)
        return PromptSize(tokens, tokens, seen * 3 * processor.temporal_patch_size, pixels)

    def _process(self, images: Sequence[tuple[int, int]]) -> PromptSize:
        if not images:
            return PromptSize(0, 0, 0, 0)
        text = self.chat.render(place_images([Turn("user", "")], len(images)))
        blank = [Image.new("RGB", size) for size in images]
        inputs = self.processor(text=[text], images=blank, return_tensors="pt")
        in_text = len(self.processor.tokenizer(text)["input_ids"]) - len(images)
        tokens = inputs["input_ids"].shape[1] - in_text
        pixels = sum(width * height for width, height in images)
        return PromptSize(tokens, tokens, inputs["pixel_values"].numel(), pixels)


def _reset(example: Example, task: Task, runner: EnvironmentRunner) -> Example:
    """Return an example with what its environment shows first."""
    environment = task.resolve(example)[1].environment
    if environment is None or type(environment).reset is Environment.reset:
        return example
    return runner.begin(environment, example)[0]
