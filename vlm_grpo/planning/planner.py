"""The plan of a recipe: its memory and time, the largest settings that fit, and changes to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoProcessor

from vlm_grpo.config.policy import LoraSettings
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.coordinates import FRAMES
from vlm_grpo.data import load_examples
from vlm_grpo.errors import UserError
from vlm_grpo.families import PixelBudget
from vlm_grpo.model.loading import get_model_source, get_pixel_budget
from vlm_grpo.planning.devices import GIB, Device, detect_device, find_device
from vlm_grpo.planning.memory import Memory, estimate_memory
from vlm_grpo.planning.model_shape import ModelShape, load_config, read_model_shape
from vlm_grpo.planning.prompt_sizes import PromptCounter, PromptSize
from vlm_grpo.planning.step_time import PhaseCosts, estimate_seconds
from vlm_grpo.planning.workload import Workload, estimate_workload
from vlm_grpo.registry import load_task

MAX_GENERATIONS = 1024
MIN_PIXELS = 128 * 28 * 28
"""Smallest pixel budget that is suggested; below it images lose too much detail."""


@dataclass(frozen=True)
class StepEstimate:
    """The memory and time of one step of a recipe on one device.

    Attributes:
        settings: the recipe's settings.
        shape: the model's shape.
        prompts: sizes of the counted prompts, in ascending order.
        memory: memory if all prompts are as long as the longest.
        seconds: time if all prompts are as long as the median; None if the device's speed is
            unknown.
        work: workload of the longest prompts.
    """

    settings: Settings
    shape: ModelShape
    prompts: list[PromptSize]
    memory: Memory
    seconds: PhaseCosts | None
    work: Workload


@dataclass(frozen=True)
class Plan:
    """Memory and time of a recipe on a device; as text, the output of ``vlm-grpo plan``.

    Attributes:
        device: the device.
        rows: number of rows of the training data.
        step: memory and time of one step of the recipe.
        largest_group: the largest ``rollout.num_generations`` that fits; 0 if not even 2 fits.
        changes: changes of settings that make the recipe fit, each in addition to those before it
            and with the resulting step; empty if the recipe fits.
        largest_batch: the largest useful ``optim.max_tokens_per_batch`` that fits after the
            changes; 0 if none fits.
    """

    device: Device
    rows: int
    step: StepEstimate
    largest_group: int
    changes: tuple[tuple[str, StepEstimate], ...]
    largest_batch: int

    @property
    def fits(self) -> bool:
        """Return whether the recipe fits without changes."""
        return self.step.memory.peak <= self.device.usable

    def __str__(self) -> str:
        return "\n".join(_format_plan(self))


def plan(settings: Settings, gpu: str | None = None, devices: int = 1) -> Plan:
    """Estimate the memory and time of a recipe; no weights are loaded.

    Args:
        settings: the recipe's settings.
        gpu: a GPU's name, for example ``H100``, or its memory, for example ``24GB``; None: this
            machine's device.
        devices: number of such devices.

    Raises:
        UserError: as for ``Planner``, or the GPU is unknown.
    """
    check_settings(settings)
    if gpu is not None and not isinstance(gpu, str):
        raise UserError(f"gpu must be text such as '24GB', not {gpu!r}")
    device = detect_device() if gpu is None else find_device(gpu)
    return Planner(settings, device, devices).plan()


class Planner:
    """An estimator of a recipe's memory and time on a device, also with changed settings.

    Args:
        settings: the recipe's settings.
        device: the device to run on.
        devices: number of such devices.

    Raises:
        UserError: data, task or configuration cannot be loaded, or the model is of a family
            without a shared-prefix form.
    """

    def __init__(self, settings: Settings, device: Device, devices: int = 1) -> None:
        self.settings, self.device, self.devices = settings, device, devices
        task = load_task(settings.task, **settings.task_options)
        examples = load_examples(settings.data.train, task, settings.data, "train")
        self.config = load_config(settings)
        shape, self.family = read_model_shape(self.config, settings.policy)
        self.task = replace(task, frame=FRAMES[self.family.frame])
        self._shapes = {settings.policy.model_dump_json(): shape}
        processor: Any = AutoProcessor.from_pretrained(
            get_model_source(settings.model),
            trust_remote_code=settings.policy.trust_remote_code,
            revision=settings.model_revision or "main",
        )
        self.default_budget = self.family.pixel_budget(processor)
        self.prompts = PromptCounter(examples, self.task, self.family, processor)

    def estimate_step(self, settings: Settings) -> StepEstimate:
        """Estimate a step under these settings."""
        policy = settings.policy
        key = policy.model_dump_json()
        if key not in self._shapes:
            self._shapes[key] = read_model_shape(self.config, policy)[0]
        shape = self._shapes[key]
        budget = get_pixel_budget(self.default_budget, policy)
        assert budget is not None  # families with the shared-prefix form resize images
        sizes = self.prompts.count(budget)
        work, typical = (
            estimate_workload(settings, size.tokens, size.patches, size.pixels, self.devices)
            for size in (sizes[-1], sizes[len(sizes) // 2])
        )
        memory = estimate_memory(shape, work, self.device.is_cpu)
        return StepEstimate(
            settings,
            shape,
            sizes,
            memory,
            estimate_seconds(shape, typical, self.device),
            work,
        )

    def plan(self) -> Plan:
        """Return the plan of the recipe."""
        step = self.estimate_step(self.settings)
        fits = step.memory.peak <= self.device.usable
        changes = () if fits else tuple(self.suggest_changes())
        last = changes[-1][1] if changes else step
        return Plan(
            device=self.device,
            rows=self.prompts.num_rows,
            step=step,
            largest_group=self.find_largest_group() if fits else 0,
            changes=changes,
            largest_batch=self.find_largest_batch(last.settings),
        )

    def fits(self, settings: Settings) -> bool:
        """Return whether a step under these settings fits."""
        return self.estimate_step(settings).memory.peak <= self.device.usable

    def find_largest_group(self) -> int:
        """Return the largest ``rollout.num_generations`` that fits; 0 if not even 2 fits."""
        return _find_largest(
            lambda group: self.fits(with_changes(self.settings, "rollout", num_generations=group)),
            2,
            MAX_GENERATIONS,
        )

    def find_largest_batch(self, settings: Settings | None = None) -> int:
        """Return the largest useful ``optim.max_tokens_per_batch`` that fits; 0 if none fits."""
        settings = settings or self.settings
        work = self.estimate_step(settings).work
        full = work.num_prompts * (
            work.prompt_tokens + work.num_generations * (work.completion_tokens - 1)
        )
        return _find_largest(
            lambda tokens: self.fits(with_changes(settings, "optim", max_tokens_per_batch=tokens)),
            work.prompt_tokens + work.completion_tokens - 1,
            full,
        )

    def suggest_changes(self) -> Iterator[tuple[str, StepEstimate]]:
        """Yield cumulative changes with the resulting steps, until the recipe fits."""
        settings = self.settings
        for change in _CHANGES:
            changed = change(self, settings)
            if changed is None:
                continue
            text, settings = changed
            step = self.estimate_step(settings)
            yield text, step
            if step.memory.peak <= self.device.usable:
                return


Change = tuple[str, Settings] | None


def with_changes(settings: Settings, block: str, **values: Any) -> Settings:
    """Return the settings with changed values in one block."""
    return settings.model_copy(update={block: getattr(settings, block).model_copy(update=values)})


def _reduce_batches(planner: Planner, settings: Settings) -> Change:
    work = planner.estimate_step(settings).work
    group_tokens = work.prompt_tokens + work.num_generations * (work.completion_tokens - 1)
    if group_tokens >= settings.optim.max_tokens_per_batch:
        return None
    text = f"optim.max_tokens_per_batch={group_tokens}"
    return text, with_changes(settings, "optim", max_tokens_per_batch=group_tokens)


def _reduce_rollouts(planner: Planner, settings: Settings) -> Change:
    step = planner.estimate_step(settings)
    work = step.work
    group_tokens = work.prompt_tokens + work.num_generations * work.completion_tokens
    if (
        step.memory.rollout <= planner.device.usable
        or group_tokens >= settings.rollout.max_tokens_per_batch
    ):
        return None
    text = f"rollout.max_tokens_per_batch={group_tokens}"
    return text, with_changes(settings, "rollout", max_tokens_per_batch=group_tokens)


def _reduce_chunks(planner: Planner, settings: Settings) -> Change:
    if 0 < settings.policy.head_chunk_tokens <= 256:
        return None
    return "policy.head_chunk_tokens=256", with_changes(settings, "policy", head_chunk_tokens=256)


def _use_checkpointing(planner: Planner, settings: Settings) -> Change:
    if settings.policy.gradient_checkpointing:
        return None
    new = with_changes(settings, "policy", gradient_checkpointing=True)
    return "policy.gradient_checkpointing=true", new


def _drop_reference(planner: Planner, settings: Settings) -> Change:
    if not settings.objective.needs_reference:
        return None
    new = with_changes(settings, "objective", beta=0.0, reference_refresh_every=1)
    return "objective.beta=0 objective.reference_refresh_every=1", new


def _use_adapters(planner: Planner, settings: Settings) -> Change:
    if settings.policy.lora is not None:
        return None
    new = with_changes(settings, "policy", lora=LoraSettings(), freeze=())
    return "policy.lora.r=64 optim.lr=1e-5", with_changes(new, "optim", lr=1e-5)


def _use_bfloat16(planner: Planner, settings: Settings) -> Change:
    if settings.policy.dtype == "bfloat16":
        return None
    return "policy.dtype=bfloat16", with_changes(settings, "policy", dtype="bfloat16")


def _halve_pixels(planner: Planner, settings: Settings) -> Change:
    largest = max(size.pixels for size in planner.estimate_step(settings).prompts)
    images = max(1, max(len(e.images) for e in planner.prompts.examples))
    pixels = largest // images // 2
    if pixels < MIN_PIXELS or pixels < (settings.policy.min_pixels or 0):
        return None
    min_pixels = min(
        settings.policy.min_pixels or (planner.default_budget or PixelBudget(1, 1)).min_pixels,
        pixels,
    )
    new = with_changes(settings, "policy", max_pixels=pixels, min_pixels=min_pixels)
    return f"policy.max_pixels={pixels}", new


# In this order: free changes, changes that cost time, changes of the training, smaller images.
_CHANGES: tuple[Callable[[Planner, Settings], Change], ...] = (
    _reduce_batches,
    _reduce_rollouts,
    _reduce_chunks,
    _use_checkpointing,
    _use_bfloat16,
    _drop_reference,
    _use_adapters,
    _halve_pixels,
    _halve_pixels,
)


def _find_largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number from ``low`` to ``high`` that fits, by bisection; 0 if none."""
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _format_plan(plan: Plan) -> Iterator[str]:
    """Yield the lines of the plan."""
    step, device = plan.step, plan.device
    shape, sizes = step.shape, step.prompts
    trained = f"{'LoRA, ' if shape.lora_rank else ''}{shape.num_trained:,} trained"
    yield f"model      {step.settings.model}: {shape.name}, {trained}, {shape.precision}"
    yield f"data       {plan.rows:,} rows, {len(sizes):,} counted"
    for name, values in (
        ("image", sorted(size.image_tokens for size in sizes)),
        ("prompt", [size.tokens for size in sizes]),
    ):
        shown = (values[0], values[len(values) // 2], values[-1])
        yield f"{name:<10} {' / '.join(f'{v:,}' for v in shown)} tokens (min / median / max)"
    work = step.work
    yield (
        f"step       {work.num_prompts} prompts × {work.num_generations} completions of "
        f"{work.completion_tokens} tokens per device; at most {work.update_tokens:,} tokens in "
        f"{work.num_micro_batches} micro-batches"
    )
    yield from _format_memory(step, device)
    if step.seconds is not None:
        yield from _format_time(step.seconds, device)
    yield from _format_advice(plan)


def _format_memory(step: StepEstimate, device: Device) -> Iterator[str]:
    memory = step.memory
    yield "memory     GiB, if every prompt is as long as the longest"
    for name in (
        "weights", "optimizer", "reference", "libraries", "features", "folded", "cache", "sampling",
        "gradients", "activations", "update",
    ):  # fmt: skip
        value = getattr(memory, name)
        if value:
            yield f"  {name:<12} {value / GIB:8.2f}  {_DESCRIPTIONS[name]}"
    yield f"  rollout      {memory.rollout / GIB:8.2f}  peak while sampling"
    yield f"  update       {memory.backward / GIB:8.2f}  peak in the update"
    yield f"  {device.name}: {device.usable / GIB:.1f} GiB usable"


_DESCRIPTIONS = {
    "weights": "model and adapters",
    "optimizer": "AdamW's moments",
    "reference": "reference policy",
    "libraries": "libraries, besides tensors",
    "features": "outputs of the frozen vision tower",
    "folded": "rollout: copies of weights for faster decoding",
    "cache": "rollout: keys and values",
    "sampling": "rollout: short-lived tensors",
    "gradients": "update: gradients",
    "activations": "update: saved for the backward pass",
    "update": "update: short-lived tensors",
}


def _format_time(seconds: PhaseCosts, device: Device) -> Iterator[str]:
    parts = ", ".join(f"{name} {value:.3g} s" for name, value in vars(seconds).items())
    yield f"time       {seconds.total:.3g} s per step: {parts}"
    yield (
        f"           an estimate for median prompts, completions of full length and "
        f"{device.efficiency:.0%} of the matmul rate"
    )


def _format_advice(plan: Plan) -> Iterator[str]:
    if plan.fits:
        free = (plan.device.usable - plan.step.memory.peak) / GIB
        yield f"fits       yes, with {free:.1f} GiB to spare"
        more = "at least " if plan.largest_group == MAX_GENERATIONS else ""
        yield f"largest    rollout.num_generations: {more}{plan.largest_group:,}"
        yield f"           optim.max_tokens_per_batch: {plan.largest_batch:,}"
        return
    missing = (plan.step.memory.peak - plan.device.usable) / GIB
    yield f"fits       no: {missing:.1f} GiB too large. Change in this order:"
    step = plan.step
    for text, step in plan.changes:
        yield f"  {text:<54} {step.memory.peak / GIB:8.2f} GiB"
    if step.memory.peak > plan.device.usable:
        yield "           not even then: use a larger device, a smaller model, or more devices"
        return
    yield f"           then optim.max_tokens_per_batch up to {plan.largest_batch:,}"
