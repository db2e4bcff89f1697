"""The plan of a recipe: its memory and time, the largest settings that fit, and changes to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from vlm_grpo.config.policy import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.data import load_run_task, load_split
from vlm_grpo.data.filtering import filter_examples
from vlm_grpo.engine.kv_cache import LOGIT_BYTES, fit_tokens
from vlm_grpo.errors import UserError
from vlm_grpo.model.chat import ChatTemplate
from vlm_grpo.model.loading import get_pixel_budget, load_config, load_processor
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.planning.changes import suggest_changes, with_changes
from vlm_grpo.planning.devices import CONTEXT, Device, detect_device, find_device
from vlm_grpo.planning.memory import Memory, count_key_bytes, estimate_memory, shard_memory
from vlm_grpo.planning.model_shape import ModelShape, read_model_shape
from vlm_grpo.planning.plan_text import MAX_GENERATIONS, format_plan
from vlm_grpo.planning.prompt_sizes import PromptCounter, PromptSize
from vlm_grpo.planning.step_time import PhaseCosts, estimate_seconds
from vlm_grpo.planning.workload import Workload, estimate_workload
from vlm_grpo.server.launch import choose_adapter_level

Weights = Literal["replicated", "sharded", "nf4"]
"""How the weights are held: all on each device, sharded over the devices by FSDP2, or those of the
decoder layers in 4 bits (QLoRA), which can be planned but not trained yet."""


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
        rows: number of rows of the training data.
        step: memory and time of one step of the recipe.
        largest_group: the largest ``rollout.num_generations`` that fits; 0 if not even 2 fits.
        changes: changes of settings that make the recipe fit, each in addition to those before it
            and with the resulting step; empty if the recipe fits.
        largest_batch: the largest useful ``optim.max_tokens_per_batch`` that fits after the
            changes; 0 if the recipe does not fit even with them.
    """

    device: Device
    num_devices: int
    rows: int
    step: StepEstimate
    largest_group: int
    changes: tuple[tuple[str, StepEstimate], ...]
    largest_batch: int

    @property
    def fits(self) -> bool:
        """Return whether the recipe fits without changes."""
        return self.device.holds(self.step.memory.peak)

    def __str__(self) -> str:
        return "\n".join(format_plan(self))


def plan(
    settings: Settings,
    gpu: str | None = None,
    devices: int = 1,
    weights: Weights = "replicated",
    reserved: float = 0.0,
) -> Plan:
    """Estimate the memory and time of a recipe; no weights are loaded.

    Args:
        settings: the recipe's settings.
        gpu: a GPU's name, for example ``H100``, or its memory, for example ``24GB``; None: this
            machine's device.
        devices: number of such devices.
        weights: how the weights are held.
        reserved: share of each device's memory that other processes use, such as a vLLM server.

    Raises:
        UserError: as for ``Planner``, or the GPU is unknown, or an argument is out of range.
    """
    check_settings(settings)
    if gpu is not None and not isinstance(gpu, str):
        raise UserError(f"gpu must be text such as '24GB', not {gpu!r}")
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise UserError(f"devices must be a whole number of at least 1, not {devices!r}")
    if devices > settings.optim.prompts_per_step:
        raise UserError(
            f"optim.prompts_per_step={settings.optim.prompts_per_step} is less than the {devices} "
            "devices, each of which needs a prompt per step"
        )
    if not 0 <= reserved < 1:
        raise UserError(f"reserved must be a share of the memory from 0 to below 1, not {reserved}")
    if weights not in get_args(Weights):
        raise UserError(f"weights must be one of {', '.join(get_args(Weights))}, not {weights!r}")
    if weights == "sharded" and devices == 1:
        raise UserError("weights cannot be sharded over one device: give --devices 2 or more")
    if weights == "nf4" and settings.policy.lora is None:
        raise UserError(
            "4-bit weights cannot be trained themselves: set policy.lora, e.g. policy.lora.r=64"
        )
    device = detect_device() if gpu is None else find_device(gpu)
    return Planner(settings, replace(device, reserved=reserved), devices, weights).plan()


class Planner:
    """An estimator of a recipe's memory and time on a device, also with changed settings.

    Args:
        settings: the recipe's settings.
        device: the device to run on.
        devices: number of such devices.
        weights: how the weights are held.

    Raises:
        UserError: data, task or configuration cannot be loaded, or the configuration lacks a size.
    """

    def __init__(
        self,
        settings: Settings,
        device: Device,
        devices: int = 1,
        weights: Weights = "replicated",
    ) -> None:
        self.settings, self.device, self.num_devices = settings, device, devices
        self.weights: Weights = weights
        task = load_run_task(settings)
        examples, _ = filter_examples(load_split(settings, task, "train"), settings.data)
        try:
            self.config, processor = load_config(settings), load_processor(settings)
        except UserError as error:
            raise UserError(
                f"{error}; a plan needs no weights: a folder with the model's config.json and the "
                "files of its tokenizer and processor suffices"
            ) from error
        shape, self.family = read_model_shape(self.config, settings.policy)
        prompts = PromptBuilder(ChatTemplate(processor, settings.prompt), self.family, None, None)
        self.task = prompts.adapt(task)
        self._shapes = {settings.policy.model_dump_json(): shape}
        self.processor, self.default_budget = processor, self.family.pixel_budget(processor)
        self.prompts = PromptCounter(examples, self.task, prompts)

    def estimate_step(self, settings: Settings, weights: Weights | None = None) -> StepEstimate:
        """Estimate a step under these settings; ``weights`` None: held as in the planner."""
        weights = weights or self.weights
        policy = settings.policy
        key = policy.model_dump_json()
        if key not in self._shapes:
            self._shapes[key] = read_model_shape(self.config, policy)[0]
        shape = self._shapes[key]
        if weights == "nf4":
            shape = shape.quantize()
        budget = get_pixel_budget(self.family, self.processor, policy)
        sizes = self.prompts.count(budget)
        work, typical = (
            estimate_workload(settings, size, shape, self.num_devices)
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
        return shard_memory(memory, shape, self.num_devices) if weights == "sharded" else memory

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
            rows=self.prompts.num_rows,
            step=step,
            largest_group=self.find_largest_group() if fits else 0,
            changes=changes,
            largest_batch=self.find_largest_batch(changes[-1][1] if changes else step),
        )

    def fits(self, settings: Settings, weights: Weights | None = None) -> bool:
        """Return whether a step under these settings fits; arguments as in ``estimate_step``."""
        return self.device.holds(self.estimate_step(settings, weights).memory.peak)

    def find_largest_group(self) -> int:
        """Return the largest ``rollout.num_generations`` that fits; 0 if not even 2 fits."""
        return _find_largest(
            lambda group: self.fits(with_changes(self.settings, "rollout", num_generations=group)),
            2,
            MAX_GENERATIONS,
        )

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
