"""A search over estimated steps: what fits, the largest settings that do, and changes to fit."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS, choose_adapter_level
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.limits import LOGIT_BYTES, fit_tokens
from vlm_grpo.planning.changes import suggest_changes, with_changes
from vlm_grpo.planning.devices import CONTEXT, Device, find_device
from vlm_grpo.planning.memory import Memory, count_key_bytes, estimate_memory
from vlm_grpo.planning.plan_text import MAX_GENERATIONS, format_plan
from vlm_grpo.planning.shape import ModelShape
from vlm_grpo.planning.shards import offload_memory, shard_memory
from vlm_grpo.planning.step_time import PhaseCosts, estimate_seconds
from vlm_grpo.planning.workload import PromptSize, Workload, estimate_workload

Weights = Literal["replicated", "sharded", "offloaded"]
"""How the weights are held: all on each device, sharded over the devices by FSDP2, or these shards
in main memory."""


CARDS = (12, 16, 24, 32, 40, 48, 80, 96, 141, 180, 192)
"""Memory of common GPUs in GB."""
PIXEL_STEP, MAX_PIXELS = 28 * 28, 1 << 25
"""Step and limit of the search for the largest image."""


@dataclass(frozen=True)
class StepEstimate:
    """The memory and time of one step of a recipe on one device.

    Attributes:
        settings: the recipe's settings.
        shape: the model's shape.
        prompts: sizes of the counted prompts, in ascending order.
        memory: memory if all prompts are as long as the longest.
        seconds: time if all prompts are as long as the median; None if the device's speed is
            unknown, or vLLM samples.
        work: workload of the longest prompts.
        weights: how the weights are held.
    """

    settings: Settings
    shape: ModelShape
    prompts: list[PromptSize]
    memory: Memory
    seconds: PhaseCosts | None
    work: Workload
    weights: Weights = "replicated"


@dataclass(frozen=True)
class Plan:
    """Memory and time of a recipe on a device; as text, the output of ``vlm-grpo plan``.

    Attributes:
        device: the device.
        num_devices: number of such devices.
        rows: number of rows of the training data; 0: prompts are assumed.
        step: memory and time of one step of the recipe.
        largest_group: the largest ``rollout.num_generations`` that fits; 0 if not even 2 fits.
        changes: changes of settings that make the recipe fit, each in addition to those before it
            and with the resulting step; empty if the recipe fits.
        largest_batch: the largest useful ``optim.max_tokens_per_batch`` that fits after the
            changes; 0 if the recipe does not fit even with them.
        largest_image: the largest ``policy.max_pixels`` that fits if all images fill it; 0 if none
            does, or the processor has no pixel budget.
        smallest_card: the smallest of ``CARDS`` that holds the unchanged recipe; None: none does.
    """

    device: Device
    num_devices: int
    rows: int
    step: StepEstimate
    largest_group: int
    changes: tuple[tuple[str, StepEstimate], ...]
    largest_batch: int
    largest_image: int = 0
    smallest_card: int | None = None

    @property
    def fits(self) -> bool:
        """Return whether the recipe fits without changes."""
        return self.device.holds(self.step.memory.peak)

    def __str__(self) -> str:
        return "\n".join(format_plan(self))


class StepPlanner(ABC):
    """An estimator of steps on a device; a subclass knows the model and the prompts.

    Args:
        settings: settings of the run.
        device: the device to run on.
        devices: number of such devices.
        weights: how the weights are held.

    Raises:
        UserError: there are more devices than prompts, or the weights cannot be held so.

    Attributes:
        num_rows: number of rows of the training data; 0: prompts are assumed.
        images_per_prompt: largest number of images in a prompt, at least 1.
        min_pixels: pixels to which the processor enlarges images; None: it has no pixel budget.
        teacher_weights: number of weights of the teacher of distillation; 0: there is none.
    """

    num_rows: int
    images_per_prompt: int
    min_pixels: int | None

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
        self.teacher_weights = 0

    @abstractmethod
    def read_shape(self, policy: PolicySettings) -> ModelShape:
        """Return the model's shape under these settings."""

    @abstractmethod
    def count_prompts(self, policy: PolicySettings) -> list[PromptSize]:
        """Return the sizes of the prompts under these settings, in ascending order."""

    def on(self, device: Device) -> Self:
        """Return the same planner on another device."""
        other = copy.copy(self)
        other.device = device
        return other

    def estimate_step(self, settings: Settings, weights: Weights | None = None) -> StepEstimate:
        """Estimate a step under these settings; ``weights`` None: held as in the planner."""
        weights = weights or self.weights
        policy = settings.policy
        key = policy.model_dump_json(exclude={"min_pixels", "max_pixels", "head_chunk_tokens"})
        if key not in self._shapes:
            self._shapes[key] = self.read_shape(policy)
        shape = self._shapes[key]
        sizes = self.count_prompts(policy)
        work, typical = (
            replace(
                estimate_workload(settings, size, shape, self.num_devices),
                teacher_weights=self.teacher_weights,
            )
            for size in (sizes[-1], sizes[len(sizes) // 2])
        )
        memory = self._estimate_memory(shape, work, weights)
        if settings.rollout.vllm is not None:
            memory = add_server(memory, shape, settings, self.device)
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
        if weights in ("sharded", "offloaded"):
            memory = shard_memory(memory, shape, self.num_devices)
        if weights == "offloaded":
            memory = offload_memory(memory, shape, work, self.num_devices)
        return memory

    def _find_rollout_budget(self, shape: ModelShape, work: Workload, memory: Memory) -> int:
        """Return the tokens that a run samples at once in a GPU's memory (``fit_tokens``)."""
        free = self.device.usable - memory.persistent - memory.folded
        place = shape.text.vocabulary * (shape.value_bytes + LOGIT_BYTES)
        completions = work.num_prompts * work.num_generations, work.completion_tokens
        tokens = fit_tokens(free, count_key_bytes(shape), place, completions)
        return max(1, tokens if shape.shares_prompts else min(tokens, DEFAULT_ROLLOUT_TOKENS))

    def plan(self) -> Plan:
        """Return the plan of the recipe."""
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
        """Return whether a step under these settings fits; arguments as in ``estimate_step``."""
        return self.device.holds(self.estimate_step(settings, weights).memory.peak)

    def find_largest_group(self, most: int = MAX_GENERATIONS) -> int:
        """Return the largest ``rollout.num_generations`` up to ``most`` that fits; 0 if not even 2
        fits."""
        return _find_largest(
            lambda group: self.fits(with_changes(self.settings, "rollout", num_generations=group)),
            2,
            most,
        )

    def find_largest_image(self) -> int:
        """Return the largest ``policy.max_pixels`` with which a step of images of that size fits;
        0 if there is none."""
        if self.min_pixels is None:
            return 0
        return PIXEL_STEP * _find_largest(
            lambda steps: self.fits(
                with_changes(
                    self.settings,
                    "policy",
                    min_pixels=steps * PIXEL_STEP,
                    max_pixels=steps * PIXEL_STEP,
                )
            ),
            1,
            MAX_PIXELS // PIXEL_STEP,
        )

    def find_smallest_card(self) -> int | None:
        """Return the smallest of ``CARDS`` that a step fits on; None if there is none."""
        sizes = (size for size in CARDS if self.on(find_device(f"{size}GB")).fits(self.settings))
        return next(sizes, None)

    def find_largest_batch(self, step: StepEstimate) -> int:
        """Return the largest useful ``optim.max_tokens_per_batch`` with which the step fits; 0 if
        the step does not fit."""
        if not self.device.holds(step.memory.peak):
            return 0
        work = step.work
        completions = work.num_prompts * work.num_generations * (work.completion_tokens - 1)
        return _find_largest(
            lambda tokens: self.fits(
                with_changes(step.settings, "optim", max_tokens_per_batch=tokens), step.weights
            ),
            work.prompt_tokens + work.completion_tokens - 1,
            work.num_groups * work.prompt_tokens + completions,
        )


def add_server(memory: Memory, model: ModelShape, settings: Settings, device: Device) -> Memory:
    """Return the memory of a step in which the servers of the settings sample, not the policy.

    A server that the run starts takes its share of the GPU while it samples, whatever it samples.
    During the update it keeps what its sleep level leaves, and the driver's memory.
    """
    vllm = settings.rollout.vllm
    if vllm is None:
        return memory
    server = resting = 0
    if vllm.python is not None and not device.is_cpu:
        server = int(vllm.gpu_memory_utilization * device.memory)
        weights = model.served_bytes
        level = vllm.sleep_level
        if level is None and model.lora_rank:
            level = choose_adapter_level(weights, device.memory)
        resting = CONTEXT + (weights if level == 0 else 0)
        if settings.rollout.steps_ahead:
            resting = server
    return replace(memory, folded=0, cache=0, sampling=0, server=server, resting=resting)


def _find_largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number from ``low`` to ``high`` that fits, by bisection; 0 if none."""
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
