"""The plan of a recipe: its memory and time, the largest settings that fit, and changes to fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.data.loading import filter_examples, load_run_task, load_split
from vlm_grpo.data.objects import NO_OBJECTS, Objects, Rows, TaskObject
from vlm_grpo.errors import UserError
from vlm_grpo.model.families import load_family
from vlm_grpo.model.loading import get_pixel_budget, load_config, load_processor
from vlm_grpo.model.prompts import ChatTemplate, PromptBuilder
from vlm_grpo.planning.devices import Device, find_device
from vlm_grpo.planning.known import describe_known
from vlm_grpo.planning.layers import measure_layers
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.plan import Plan, Weights
from vlm_grpo.planning.prompt_sizes import PromptCounter
from vlm_grpo.planning.search import StepPlanner
from vlm_grpo.planning.shape import ModelShape
from vlm_grpo.planning.this_device import detect_device
from vlm_grpo.planning.workload import PromptSize


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
