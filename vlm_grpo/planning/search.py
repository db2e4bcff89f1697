"""A search over estimated steps: what fits, the largest settings that do, and changes to fit."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.batch import LOGIT_BYTES, fit_tokens
from vlm_grpo.planning.devices import Device, find_device
from vlm_grpo.planning.memory import (
    Memory,
    add_server,
    count_key_bytes,
    estimate_memory,
    shard_memory,
)
from vlm_grpo.planning.plan import MAX_GENERATIONS, Plan, StepEstimate, Weights
from vlm_grpo.planning.shape import ModelShape
from vlm_grpo.planning.step_time import estimate_seconds
from vlm_grpo.planning.workload import PromptSize, Workload, estimate_workload

CARDS = (12, 16, 24, 32, 40, 48, 80, 96, 141, 180, 192)
"""Memory of common GPUs in GB."""
COUNTED_LATER = (
    *("gradient_checkpointing", "activation_offloading", "head_chunk_tokens"),
    *("min_pixels", "max_pixels"),
)
"""Settings of the policy that do not change what ``StepPlanner.read_shape`` returns."""
PIXEL_STEP, MAX_PIXELS = 28 * 28, 1 << 25
"""Step and limit of the search for the largest image."""


class StepPlanner(ABC):
    """An estimator of steps on a device; a subclass knows the model and the prompts."""

    num_rows: int  # of the training data; 0: prompts are assumed
    images_per_prompt: int  # largest number of images in a prompt, at least 1
    min_pixels: int | None  # to which images are enlarged; None: there is no pixel budget

    def __init__(
        self,
        settings: Settings,
        device: Device,
        devices: int = 1,
        weights: Weights = "replicated",
    ) -> None:
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

    @abstractmethod
    def read_shape(self, policy: PolicySettings) -> ModelShape:
        """Return the model's shape under these settings."""

    @abstractmethod
    def count_prompts(self, policy: PolicySettings) -> list[PromptSize]:
        """Return the sizes of the prompts under these settings, in ascending order."""

    def on(self, device: Device) -> Self:
        other = copy.copy(self)
        other.device = device
        return other

    def estimate_step(self, settings: Settings, weights: Weights | None = None) -> StepEstimate:
        """Estimate a step under these settings; ``weights`` None: held as in the planner."""
        weights = weights or self.weights
        policy = settings.policy
        key = policy.model_dump_json(exclude=set(COUNTED_LATER))
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
            return memory
        return shard_memory(memory, shape, work, self.num_devices, weights == "offloaded")

    def _find_rollout_budget(self, shape: ModelShape, work: Workload, memory: Memory) -> int:
        free = self.device.usable - memory.persistent - memory.folded
        place = shape.text.vocabulary * (shape.value_bytes + LOGIT_BYTES)
        completions = work.num_prompts * work.num_generations, work.completion_tokens
        tokens = fit_tokens(free, count_key_bytes(shape), place, completions)
        return max(1, tokens if shape.shares_prompts else min(tokens, DEFAULT_ROLLOUT_TOKENS))

    def plan(self) -> Plan:
        step = self.estimate_step(self.settings)
        fits = self.device.holds(step.memory.peak)
        changes = () if fits else tuple(suggest_changes(self, step))
        return Plan(
            device=self.device,
            num_devices=self.num_devices,
            rows=self.num_rows,
            step=step,
            largest_group=self.find_largest_group() if fits else 0,
            changes=changes,
            largest_batch=self.find_largest_batch(changes[-1][1] if changes else step),
            largest_image=self.find_largest_image() if fits else 0,
            smallest_card=None if self.device.is_cpu else self.find_smallest_card(),
        )

    def fits(self, settings: Settings, weights: Weights | None = None) -> bool:
        return self.device.holds(self.estimate_step(settings, weights).memory.peak)

    def find_largest_group(self, most: int = MAX_GENERATIONS) -> int:
        """Return the largest group that fits, up to ``most``; 0: not even 2 fits."""

        def fits(group: int) -> bool:
            return self.fits(with_changes(self.settings, "rollout", num_generations=group))

        return _find_largest(fits, 2, most)

    def find_largest_image(self) -> int:
        """Return the largest size of all images, in pixels, that fits; 0: none does."""

        def fits(steps: int) -> bool:
            pixels = {"min_pixels": steps * PIXEL_STEP, "max_pixels": steps * PIXEL_STEP}
            return self.fits(with_changes(self.settings, "policy", **pixels))

        if self.min_pixels is None:
            return 0
        return PIXEL_STEP * _find_largest(fits, 1, MAX_PIXELS // PIXEL_STEP)

    def find_smallest_card(self) -> int | None:
        """Return the smallest of ``CARDS`` that a step fits on; None: there is none."""
        sizes = (size for size in CARDS if self.on(find_device(f"{size}GB")).fits(self.settings))
        return next(sizes, None)

    def find_largest_batch(self, step: StepEstimate) -> int:
        """Return the largest useful micro-batch in tokens that fits; 0: the step does not fit."""
        if not self.device.holds(step.memory.peak):
            return 0
        work = step.work
        completions = work.num_prompts * work.num_generations * (work.completion_tokens - 1)

        def fits(tokens: int) -> bool:
            changed = with_changes(step.settings, "optim", max_tokens_per_batch=tokens)
            return self.fits(changed, step.weights)

        least = work.prompt_tokens + work.completion_tokens - 1
        return _find_largest(fits, least, work.num_groups * work.prompt_tokens + completions)


def _find_largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number from ``low`` to ``high`` that fits, by bisection; 0 if none."""
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


MIN_PIXELS = 128 * 28 * 28  # the least that is suggested; below it images lose too much detail
SHARDING = "weights sharded over the devices (FSDP2)"  # not a setting but another launch
Change = tuple[str, StepEstimate]
"""Settings as they are written on the command line, and the step with them."""
_Proposal = Callable[[StepPlanner, StepEstimate], Change | None]


def suggest_changes(planner: StepPlanner, step: StepEstimate) -> Iterator[Change]:
    """Yield cumulative changes with the resulting steps, until a step fits."""
    for change in _CHANGES:
        changed = change(planner, step)
        if changed is not None:
            yield changed
            step = changed[1]
            if planner.device.holds(step.memory.peak):
                return


def with_changes(settings: Settings, block: str, **values: Any) -> Settings:
    return settings.model_copy(update={block: getattr(settings, block).model_copy(update=values)})


def _change(planner: StepPlanner, step: StepEstimate, block: str, **values: Any) -> Change:
    texts = [f"{block}.{name}={str(value).lower()}" for name, value in values.items()]
    changed = with_changes(step.settings, block, **values)
    return " ".join(texts), planner.estimate_step(changed, step.weights)


def _reduce_batches(planner: StepPlanner, step: StepEstimate) -> Change | None:
    work = step.work
    tokens = work.prompt_tokens + work.num_generations * (work.completion_tokens - 1)
    if tokens >= step.settings.optim.max_tokens_per_batch:
        return None
    return _change(planner, step, "optim", max_tokens_per_batch=tokens)


def _reduce_rollouts(planner: StepPlanner, step: StepEstimate) -> Change | None:
    work = step.work
    tokens = work.prompt_tokens + work.num_generations * work.completion_tokens
    if step.settings.rollout.vllm is not None:
        return None
    if tokens >= work.rollout_budget or planner.device.holds(step.memory.rollout):
        return None
    return _change(planner, step, "rollout", max_tokens_per_batch=tokens)


def _use_checkpointing(planner: StepPlanner, step: StepEstimate) -> Change | None:
    used = step.settings.policy.gradient_checkpointing
    parts = {"none": ("mlp", "full"), "mlp": ("full",), "full": ()}[used]
    changes = [_change(planner, step, "policy", gradient_checkpointing=part) for part in parts]
    fitting = (change for change in changes if planner.device.holds(change[1].memory.peak))
    return next(fitting, changes[-1] if changes else None)


def _shard(planner: StepPlanner, step: StepEstimate) -> Change | None:
    if planner.num_devices == 1 or step.weights != "replicated":
        return None
    return SHARDING, planner.estimate_step(step.settings, "sharded")


def _use_adapters(planner: StepPlanner, step: StepEstimate) -> Change | None:
    if step.settings.policy.lora is not None:
        return None
    new = with_changes(step.settings, "policy", lora=LoraSettings(), freeze=())
    new = with_changes(new, "optim", lr=1e-5)
    # The rollout needs the full base weights on each device, so that sharding them saves little.
    is_sharded = step.weights == "sharded"
    text = "policy.lora.r=64 optim.lr=1e-5" + (", without FSDP2" if is_sharded else "")
    return text, planner.estimate_step(new, "replicated")


def _halve_pixels(planner: StepPlanner, step: StepEstimate) -> Change | None:
    policy, smallest = step.settings.policy, planner.min_pixels
    if smallest is None:
        return None
    largest = max(size.pixels for size in step.prompts)
    pixels = largest // planner.images_per_prompt // 2
    if pixels < MIN_PIXELS or pixels < (policy.min_pixels or 0):
        return None
    min_pixels = min(policy.min_pixels or smallest, pixels)
    new = with_changes(step.settings, "policy", max_pixels=pixels, min_pixels=min_pixels)
    return f"policy.max_pixels={pixels}", planner.estimate_step(new, step.weights)


def _set(applies: Callable[[StepEstimate], bool], block: str, **values: Any) -> _Proposal:
    return lambda planner, step: _change(planner, step, block, **values) if applies(step) else None


# In this order: free changes, changes that cost time, changes of the training, smaller images.
_CHANGES: tuple[_Proposal, ...] = (
    _reduce_batches,
    _reduce_rollouts,
    _set(
        lambda s: s.shape.shares_prompts and not 0 < s.settings.policy.head_chunk_tokens <= 256,
        "policy",
        head_chunk_tokens=256,
    ),
    _use_checkpointing,
    _shard,
    _set(lambda s: s.settings.policy.dtype != "bfloat16", "policy", dtype="bfloat16"),
    _set(
        lambda s: s.settings.objective.needs_reference,
        "objective",
        beta=0.0,
        reference_refresh_every=1,
    ),
    _use_adapters,
    _set(
        lambda s: (
            s.settings.policy.lora is not None
            and s.settings.policy.load_in == "none"
            and s.weights == "replicated"
        ),
        "policy",
        load_in="4bit",
    ),
    _halve_pixels,
    _halve_pixels,
)
