"""Estimates of the steps of a recipe on a device, also with changed settings."""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.data.filter import filter_examples
from vlm_grpo.data.loading import load_split
from vlm_grpo.data.mixed_task import load_run_task
from vlm_grpo.data.objects import NO_OBJECTS, Objects
from vlm_grpo.errors import UserError
from vlm_grpo.model.chat_template import ChatTemplate
from vlm_grpo.model.engine.packing import LOGIT_BYTES, fit_tokens
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.hub import load_known_models
from vlm_grpo.model.loading import get_pixel_budget, load_config, load_processor
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.planning.devices import CARDS, Device, detect_device, find_device
from vlm_grpo.planning.layer_memory import measure_layers
from vlm_grpo.planning.memory import (
    ENOUGH_TOKENS,
    UPDATE_TOKENS,
    Memory,
    add_server,
    count_graph_bytes,
    count_key_bytes,
    estimate_memory,
    fit_update_tokens,
    shard_memory,
)
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.prompts import PromptCounter
from vlm_grpo.planning.sizes import ModelShape, PromptSize, Workload, estimate_workload
from vlm_grpo.planning.step_time import PhaseCosts, estimate_seconds

Weights = Literal["replicated", "sharded", "offloaded"]
"""How the weights are held: all on each device, sharded over the devices by FSDP2, or these shards
in main memory."""
_COUNTED_LATER = {
    *("gradient_checkpointing", "activation_offloading", "head_chunk_tokens"),
    *("min_pixels", "max_pixels"),
}
"""Settings of the policy that do not change what ``Planner.read_shape`` returns."""


@dataclass(frozen=True)
class StepEstimate:
    """The memory and time of one step of a recipe on one device.

    Memory and work are those of prompts that are all as long as the longest, seconds those of the
    median prompt.
    """

    settings: Settings
    shape: ModelShape
    prompts: list[PromptSize]  # in ascending order
    memory: Memory
    seconds: PhaseCosts | None  # None: the device's speed is unknown, or vLLM samples
    work: Workload
    weights: Weights = "replicated"


def choose_device(gpu: str | None, reserved: float) -> Device:
    """Return the device of the arguments of ``plan``, which are checked."""
    if gpu is not None and not isinstance(gpu, str):
        raise UserError(f"gpu must be text such as '24GB', not {gpu!r}")
    if not 0 <= reserved < 1:
        raise UserError(f"reserved must be a share of the memory from 0 to below 1, not {reserved}")
    return replace(detect_device() if gpu is None else find_device(gpu), reserved=reserved)


class Planner:
    """An estimator of a recipe's memory and time on a device, also with changed settings."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        devices: int = 1,
        weights: Weights = "replicated",
        objects: Objects = NO_OBJECTS,
    ) -> None:
        check_settings(settings)
        if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
            raise UserError(f"devices must be a whole number of at least 1, not {devices!r}")
        if weights not in (kinds := get_args(Weights)):
            raise UserError(f"weights must be one of {', '.join(kinds)}, not {weights!r}")
        settings = objects.name_in(settings)
        if devices > settings.optim.prompts_per_step:
            raise UserError(
                f"optim.prompts_per_step={settings.optim.prompts_per_step} is less than the "
                f"{devices} devices, each of which needs a prompt per step"
            )
        if weights == "sharded" and devices == 1:
            raise UserError("weights cannot be sharded over one device: give --devices 2 or more")
        if settings.policy.load_in != "none" and settings.policy.lora is None:
            raise UserError("quantized weights cannot be trained themselves: set policy.lora.r=16")
        if settings.policy.load_in != "none" and weights != "replicated":
            raise UserError("quantized weights cannot be sharded: leave out --weights sharded")
        self.settings, self.device, self.num_devices = settings, device, devices
        self.weights: Weights = weights
        self._shapes: dict[str, ModelShape] = {}
        self.teacher_weights = 0  # number of weights of the models of methods
        for name in (own.extra_model for own in settings.used_methods):
            if name:
                changes = {"model": name, "model_revision": None}
                teacher = load_config(settings.model_copy(update=changes))
                self.teacher_weights += read_model_shape(teacher, PolicySettings()).num_weights
        self.read(objects)

    def read(self, objects: Objects) -> None:
        """Read the model's configuration and the data's prompts."""
        settings = self.settings
        task = load_run_task(settings, objects)
        rows = load_split(settings, task, "train", objects)
        examples, _ = filter_examples(rows, settings.data)
        try:
            self.config = load_config(settings)
            processor = load_processor(settings, self.config)
        except UserError as error:
            hint = f"; vlm-grpo plan {settings.model} plans it without them, for assumed prompts"
            hint = hint if settings.model in load_known_models() else ""
            raise UserError(
                f"{error}; a plan needs no weights: a folder with the model's config.json and the "
                "files of its tokenizer and processor suffices" + hint
            ) from error
        self.family = load_family(self.config)
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
        """Return the sizes of the prompts under these settings, in ascending order."""
        return self.prompts.count(get_pixel_budget(self.family, self.processor, policy))

    def on(self, device: Device) -> Self:
        other = copy.copy(self)
        other.device = device
        return other

    def estimate_step(
        self, settings: Settings, weights: Weights | None = None, least: int = UPDATE_TOKENS[0]
    ) -> StepEstimate:
        """Estimate a step under these settings. ``weights``: None means the planner's.
        Micro-batches whose size is found automatically have at least ``least`` tokens."""
        weights = weights or self.weights
        policy = settings.policy
        if policy.gradient_checkpointing == "auto":  # the first that fits, as the update does
            parts = ("none", "mlp", "full") if weights == "replicated" else ("full",)
            for part in parts:
                changed = with_changes(settings, "policy", gradient_checkpointing=part)
                least = UPDATE_TOKENS[0] if part == "full" else ENOUGH_TOKENS
                step = self.estimate_step(changed, weights, least)
                if self.device.holds(step.memory.peak):
                    break
            return replace(step, settings=settings)
        key = get_shape_key(policy)
        if key not in self._shapes:
            self._shapes[key] = self.read_shape(policy)
        shape = replace(
            self._shapes[key],
            checkpointing=policy.gradient_checkpointing,
            offloads=policy.activation_offloading,
        )
        sizes = self.count_prompts(policy)
        place = (self.num_devices, self.teacher_weights)
        work = estimate_workload(settings, sizes[-1], shape, *place)
        typical = estimate_workload(settings, sizes[len(sizes) // 2], shape, *place)
        memory = self._estimate_memory(shape, work, weights)
        if settings.optim.max_tokens_per_batch is None and not self.device.is_cpu:
            held = add_server(memory, shape, settings.rollout, self.device).resting
            free = self.device.usable - memory.persistent - memory.gradients - held
            token = (memory.activations + memory.update) / work.micro_tokens
            budget = fit_update_tokens(free, token, least)
            work, typical = (replace(w, update_budget=budget) for w in (work, typical))
            memory = self._estimate_memory(shape, work, weights)
        if settings.rollout.vllm is not None:
            memory = add_server(memory, shape, settings.rollout, self.device)
            return StepEstimate(settings, shape, sizes, memory, None, work, weights)
        if settings.rollout.max_tokens_per_batch is None and not self.device.is_cpu:
            budget = self._find_rollout_budget(shape, work, memory)
            work, typical = (replace(w, rollout_budget=budget) for w in (work, typical))
            memory = self._estimate_memory(shape, work, weights)
        seconds = estimate_seconds(shape, typical, self.device)
        return StepEstimate(settings, shape, sizes, memory, seconds, work, weights)

    def _estimate_memory(self, shape: ModelShape, work: Workload, weights: Weights) -> Memory:
        memory = estimate_memory(shape, work, self.device.is_cpu)
        matrices, free = shape.quantized_weights * shape.value_bytes, self.device.usable
        if 0 < 2 * matrices <= free - memory.persistent and not self.device.is_cpu:
            memory = replace(memory, folded=matrices)  # restored once (engine/rollout_weights.py)
        if weights == "replicated":
            can_capture = shape.shares_prompts and not self.device.is_cpu
            captures = can_capture and self.settings.rollout.cuda_graphs is not False
            return replace(memory, graphs=count_graph_bytes(work) if captures else 0)
        return shard_memory(memory, shape, work, self.num_devices, weights == "offloaded")

    def _find_rollout_budget(self, shape: ModelShape, work: Workload, memory: Memory) -> int:
        free = self.device.usable - memory.persistent - memory.folded
        place = shape.text.vocabulary * (shape.value_bytes + LOGIT_BYTES)
        completions = work.num_prompts * work.num_generations, work.path_tokens
        tokens = fit_tokens(free, count_key_bytes(shape), place, completions)
        return max(1, tokens if shape.shares_prompts else min(tokens, DEFAULT_ROLLOUT_TOKENS))

    def fits(self, settings: Settings) -> bool:
        return self.device.holds(self.estimate_step(settings).memory.peak)

    def find_largest_group(self, most: int) -> int:
        """Return the largest group that fits, up to ``most``; 0: not even 2 fits."""

        def is_too_large(group: int) -> bool:
            return not self.fits(with_changes(self.settings, "rollout", num_generations=group))

        count = bisect_left(range(2, most + 1), True, key=is_too_large)
        return count + 1 if count else 0

    def find_smallest_card(self) -> int | None:
        """Return the smallest of ``CARDS`` that a step fits on; None: there is none."""
        sizes = (size for size in CARDS if self.on(find_device(f"{size}GB")).fits(self.settings))
        return next(sizes, None)


def get_shape_key(policy: PolicySettings) -> str:
    """Return the policy's settings that change what ``Planner.read_shape`` returns."""
    return policy.model_dump_json(exclude=_COUNTED_LATER)


def with_changes(settings: Settings, block: str, **values: Any) -> Settings:
    return settings.model_copy(update={block: getattr(settings, block).model_copy(update=values)})
