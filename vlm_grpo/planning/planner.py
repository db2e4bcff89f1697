"""The plan of a recipe: its memory and time, the largest settings that fit, and changes to fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import get_args

from PIL import Image

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.data.loading import filter_examples, load_run_task, load_split
from vlm_grpo.data.objects import NO_OBJECTS, Objects, Rows, TaskObject
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.model.families import PixelBudget, load_family
from vlm_grpo.model.loading import get_pixel_budget, load_config, load_processor
from vlm_grpo.model.prompts import ChatTemplate, PromptBuilder
from vlm_grpo.planning.activations import measure_layers
from vlm_grpo.planning.devices import Device, find_device
from vlm_grpo.planning.known import describe_known
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.plan import Plan, StepPlanner, Weights
from vlm_grpo.planning.sizes import ModelShape, PromptSize
from vlm_grpo.planning.this_device import detect_device
from vlm_grpo.task import Task
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils.chat import Turn, place_images

MAX_COUNTED_EXAMPLES = 2000
"""Largest number of examples counted; they are spaced evenly over the dataset."""
MAX_PROCESSED_EXAMPLES = 200
"""The same if the image processor has to run, because its resizing is not known."""


def plan(
    settings: Settings,
    gpu: str | None = None,
    devices: int = 1,
    weights: Weights = "replicated",
    reserved: float = 0.0,
    *,
    task: TaskObject | Mapping[str, TaskObject] | None = None,
    data: Rows | Mapping[str, Rows] | None = None,
) -> Plan:
    """Estimate the memory and time of a recipe; no weights are loaded.

    Args:
        gpu: a GPU's name, for example ``H100``, or its memory, for example ``24GB``; None: this
            machine's device.
        devices: number of such devices.
        weights: how the weights are held.
        reserved: share of each device's memory that other processes use, such as a vLLM server.
        task, data: Python objects in place of those of the settings, as for ``train``.

    Raises:
        UserError: an argument is out of range, or the GPU is unknown; data, task or configuration
            cannot be loaded, or the configuration lacks a size; or there are more devices than
            prompts, or the weights cannot be held so.
    """
    check_settings(settings)
    if gpu is not None and not isinstance(gpu, str):
        raise UserError(f"gpu must be text such as '24GB', not {gpu!r}")
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise UserError(f"devices must be a whole number of at least 1, not {devices!r}")
    if not 0 <= reserved < 1:
        raise UserError(f"reserved must be a share of the memory from 0 to below 1, not {reserved}")
    if weights not in get_args(Weights):
        raise UserError(f"weights must be one of {', '.join(get_args(Weights))}, not {weights!r}")
    device = detect_device() if gpu is None else find_device(gpu)
    device = replace(device, reserved=reserved)
    return Planner(settings, device, devices, weights, Objects(task, data)).plan()


class Planner(StepPlanner):
    """An estimator of a recipe's memory and time on a device, also with changed settings."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        devices: int = 1,
        weights: Weights = "replicated",
        objects: Objects = NO_OBJECTS,
    ) -> None:
        settings = objects.name_in(settings)
        super().__init__(settings, device, devices, weights)
        task = load_run_task(settings, objects)
        rows = load_split(settings, task, "train", objects)
        examples, _ = filter_examples(rows, settings.data)
        try:
            self.config, processor = load_config(settings), load_processor(settings)
        except UserError as error:
            raise UserError(
                f"{error}; a plan needs no weights: a folder with the model's config.json and the "
                "files of its tokenizer and processor suffices" + describe_known(settings.model)
            ) from error
        self.family = load_family(self.config)
        for name in (own.extra_model for own in settings.used_methods):
            if name is not None:
                changes = {"model": name, "model_revision": None}
                teacher = load_config(settings.model_copy(update=changes))
                self.teacher_weights += read_model_shape(teacher, PolicySettings()).num_weights
        prompts = PromptBuilder(ChatTemplate(processor, settings.prompt), self.family, None, None)
        self.task = prompts.adapt(task)
        budget = self.family.pixel_budget(processor)
        self.processor, self.min_pixels = processor, None if budget is None else budget.min_pixels
        self.prompts = PromptCounter(examples, self.task, prompts)
        self.num_rows = len(examples)
        self.images_per_prompt = max(1, *(len(e.images) for e in self.prompts.examples))

    def read_shape(self, policy: PolicySettings) -> ModelShape:
        return measure_layers(read_model_shape(self.config, policy), policy, self.device.is_cpu)

    def count_prompts(self, policy: PolicySettings) -> list[PromptSize]:
        return self.prompts.count(get_pixel_budget(self.family, self.processor, policy))


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
                if budget:
                    size = self._resize(images, budget)
                else:
                    size = self._process(tuple(image.size for image in images))
                sizes.append(replace(size, tokens=text_tokens + size.image_tokens))
            except ValueError as error:
                problems.append(f"{example.id}: {error}")
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
        blank = [Image.new("RGB", size) for size in images]
        inputs = self.processor(text=[text], images=blank, return_tensors="pt")
        in_text = len(self.processor.tokenizer(text)["input_ids"]) - len(images)
        tokens = inputs["input_ids"].shape[1] - in_text
        pixels = sum(width * height for width, height in images)
        return PromptSize(tokens, tokens, inputs["pixel_values"].numel(), pixels)
