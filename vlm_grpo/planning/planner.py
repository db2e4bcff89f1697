"""A recipe's memory and time, what would be the most that fits, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoProcessor

from vlm_grpo.config.policy import LoraSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.coordinates import FRAMES
from vlm_grpo.data import load_examples
from vlm_grpo.families import PixelBudget
from vlm_grpo.model.loading import get_model_source, get_pixel_budget
from vlm_grpo.planning.devices import GIB, Device, named_device, this_device
from vlm_grpo.planning.memory import Memory, estimate_memory
from vlm_grpo.planning.seconds import Phases, estimate_seconds
from vlm_grpo.planning.shape import ModelShape, load_config, read_shape
from vlm_grpo.planning.tokens import Prompts, PromptSize
from vlm_grpo.planning.work import Work, estimate_work
from vlm_grpo.registry import load_task

MOST_GENERATIONS = 1024
LEAST_PIXELS = 128 * 28 * 28
"""Below this pixel budget no change is proposed: too little of an image would be left."""


@dataclass(frozen=True)
class Step:
    """What one step of a recipe takes on one device.

    Attributes:
        settings: the recipe's.
        shape: the model's.
        prompts: every counted prompt, shortest first.
        memory: with all prompts as long as the longest.
        seconds: with all prompts as long as the median; None where the device is not known.
        work: of the longest prompts.
        typical: of the median ones.
    """

    settings: Settings
    shape: ModelShape
    prompts: list[PromptSize]
    memory: Memory
    seconds: Phases | None
    work: Work
    typical: Work


@dataclass(frozen=True)
class Plan:
    """Memory and time of a recipe on a device; as text, the output of ``vlm-grpo plan``.

    Attributes:
        device: the device.
        rows: number of rows of the training data.
        step: memory and time of one step of the recipe.
        largest_group: the largest ``rollout.num_generations`` that fits; 0 where not even 2 does.
        changes: changes of settings that make the recipe fit, each on top of those before it and
            with the step after it; empty where it fits.
        largest_batch: the largest useful ``optim.max_tokens_per_batch`` that fits after the
            changes; 0 where none does.
    """

    device: Device
    rows: int
    step: Step
    largest_group: int
    changes: tuple[tuple[str, Step], ...]
    largest_batch: int

    @property
    def fits(self) -> bool:
        """Return whether the recipe fits as it is."""
        return self.step.memory.peak <= self.device.usable

    def __str__(self) -> str:
        return "\n".join(lines(self))


def plan(settings: Settings, gpu: str | None = None, devices: int = 1) -> Plan:
    """Estimate the memory and time of a recipe; no weights are loaded.

    Args:
        settings: the recipe's.
        gpu: a GPU's name, as ``H100``, or its memory, as ``24GB``; None: this machine's device.
        devices: number of such devices.

    Raises:
        UserError: as for ``Planner``, or the GPU is not known.
    """
    device = this_device() if gpu is None else named_device(gpu)
    return Planner(settings, device, devices).plan()


class Planner:
    """Plans a recipe, and the recipe with changes.

    Args:
        settings: the recipe's.
        device: what it shall run on.
        devices: how many of them.

    Raises:
        UserError: data, task or configuration cannot be loaded, or the model is of a family
            without a shared-prefix form.
    """

    def __init__(self, settings: Settings, device: Device, devices: int = 1) -> None:
        self.settings, self.device, self.devices = settings, device, devices
        task = load_task(settings.task, **settings.task_options)
        examples = load_examples(settings.data.train, task, settings.data, "train")
        self.config = load_config(settings)
        shape, self.family = read_shape(self.config, settings.policy)
        self.task = replace(task, frame=FRAMES[self.family.frame])
        self._shapes = {settings.policy.model_dump_json(): shape}
        processor: Any = AutoProcessor.from_pretrained(
            get_model_source(settings.model),
            trust_remote_code=settings.policy.trust_remote_code,
            revision=settings.model_revision or "main",
        )
        self.own = self.family.pixel_budget(processor)
        self.prompts = Prompts(examples, self.task, self.family, processor)

    def step(self, settings: Settings) -> Step:
        """One step under these settings."""
        policy = settings.policy
        key = policy.model_dump_json()
        if key not in self._shapes:
            self._shapes[key] = read_shape(self.config, policy)[0]
        shape = self._shapes[key]
        budget = get_pixel_budget(self.own, policy)
        assert budget is not None  # families that share a prompt resize
        sizes = self.prompts.sizes(budget)
        work, typical = (
            estimate_work(settings, size.tokens, size.patches, size.pixels, self.devices)
            for size in (sizes[-1], sizes[len(sizes) // 2])
        )
        memory = estimate_memory(shape, work, self.device.is_cpu)
        return Step(
            settings,
            shape,
            sizes,
            memory,
            estimate_seconds(shape, typical, self.device),
            work,
            typical,
        )

    def plan(self) -> Plan:
        """Return the plan of the recipe."""
        step = self.step(self.settings)
        fits = step.memory.peak <= self.device.usable
        changes = () if fits else tuple(self.remedies())
        last = changes[-1][1] if changes else step
        return Plan(
            device=self.device,
            rows=self.prompts.rows,
            step=step,
            largest_group=self.largest_group() if fits else 0,
            changes=changes,
            largest_batch=self.largest_batch(last.settings),
        )

    def fits(self, settings: Settings) -> bool:
        return self.step(settings).memory.peak <= self.device.usable

    def largest_group(self) -> int:
        """The largest ``rollout.num_generations`` that fits; 0 where not even 2 does."""
        return _largest(
            lambda group: self.fits(changed(self.settings, "rollout", num_generations=group)),
            2,
            MOST_GENERATIONS,
        )

    def largest_batch(self, settings: Settings | None = None) -> int:
        """The largest useful ``optim.max_tokens_per_batch`` that fits; 0 where none does."""
        settings = settings or self.settings
        work = self.step(settings).work
        whole = work.prompts * (work.prompt + work.group * (work.completion - 1))
        return _largest(
            lambda tokens: self.fits(changed(settings, "optim", max_tokens_per_batch=tokens)),
            work.prompt + work.completion - 1,
            whole,
        )

    def remedies(self) -> Iterator[tuple[str, Step]]:
        """Changes, each on top of those before it, until the recipe fits; what each leads to."""
        settings = self.settings
        for change in _CHANGES:
            found = change(self, settings)
            if found is None:
                continue
            text, settings = found
            step = self.step(settings)
            yield text, step
            if step.memory.peak <= self.device.usable:
                return


Change = tuple[str, Settings] | None


def changed(settings: Settings, block: str, **values: Any) -> Settings:
    """The settings with other values in one block."""
    return settings.model_copy(update={block: getattr(settings, block).model_copy(update=values)})


def _smaller_batches(planner: Planner, settings: Settings) -> Change:
    work = planner.step(settings).work
    one = work.prompt + work.group * (work.completion - 1)
    if one >= settings.optim.max_tokens_per_batch:
        return None
    return f"optim.max_tokens_per_batch={one}", changed(settings, "optim", max_tokens_per_batch=one)


def _smaller_rollouts(planner: Planner, settings: Settings) -> Change:
    step = planner.step(settings)
    work = step.work
    one = work.prompt + work.group * work.completion
    if step.memory.rollout <= planner.device.usable or one >= settings.rollout.max_tokens_per_batch:
        return None
    text = f"rollout.max_tokens_per_batch={one}"
    return text, changed(settings, "rollout", max_tokens_per_batch=one)


def _smaller_chunks(planner: Planner, settings: Settings) -> Change:
    if 0 < settings.policy.head_chunk_tokens <= 256:
        return None
    return "policy.head_chunk_tokens=256", changed(settings, "policy", head_chunk_tokens=256)


def _checkpointing(planner: Planner, settings: Settings) -> Change:
    if settings.policy.gradient_checkpointing:
        return None
    new = changed(settings, "policy", gradient_checkpointing=True)
    return "policy.gradient_checkpointing=true", new


def _no_reference(planner: Planner, settings: Settings) -> Change:
    if not settings.objective.needs_reference:
        return None
    new = changed(settings, "objective", beta=0.0, reference_refresh_every=1)
    return "objective.beta=0 objective.reference_refresh_every=1", new


def _adapters(planner: Planner, settings: Settings) -> Change:
    if settings.policy.lora is not None:
        return None
    new = changed(settings, "policy", lora=LoraSettings(), freeze=())
    return "policy.lora.r=64 optim.lr=1e-5", changed(new, "optim", lr=1e-5)


def _bfloat16(planner: Planner, settings: Settings) -> Change:
    if settings.policy.dtype == "bfloat16":
        return None
    return "policy.dtype=bfloat16", changed(settings, "policy", dtype="bfloat16")


def _half_the_pixels(planner: Planner, settings: Settings) -> Change:
    largest = max(size.pixels for size in planner.step(settings).prompts)
    images = max(1, max(len(e.images) for e in planner.prompts.examples))
    pixels = largest // images // 2
    if pixels < LEAST_PIXELS or pixels < (settings.policy.min_pixels or 0):
        return None
    least = min(settings.policy.min_pixels or (planner.own or PixelBudget(1, 1)).min_pixels, pixels)
    new = changed(settings, "policy", max_pixels=pixels, min_pixels=least)
    return f"policy.max_pixels={pixels}", new


# What costs nothing comes first, then time, then what changes the training, then what is seen.
_CHANGES: tuple[Callable[[Planner, Settings], Change], ...] = (
    _smaller_batches,
    _smaller_rollouts,
    _smaller_chunks,
    _checkpointing,
    _bfloat16,
    _no_reference,
    _adapters,
    _half_the_pixels,
    _half_the_pixels,
)


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from ``low`` to ``high`` for which ``fits`` holds; 0 where none does."""
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def lines(plan: Plan) -> Iterator[str]:
    """The plan, line by line."""
    step, device = plan.step, plan.device
    shape, sizes = step.shape, step.prompts
    share = f"LoRA, {shape.trained:,} trained" if shape.rank else f"{shape.trained:,} trained"
    yield f"model      {step.settings.model}: {shape.name}, {share}, {shape.precision}"
    yield f"data       {plan.rows:,} rows, {len(sizes):,} counted"
    for name, values in (
        ("image", sorted(size.image_tokens for size in sizes)),
        ("prompt", [size.tokens for size in sizes]),
    ):
        shown = (values[0], values[len(values) // 2], values[-1])
        yield f"{name:<10} {' / '.join(f'{v:,}' for v in shown)} tokens (min / median / max)"
    work = step.work
    yield (
        f"step       {work.prompts} prompts × {work.group} completions of {work.completion} tokens "
        f"a device; at the longest {work.update_tokens:,} tokens in "
        f"{work.micro_batches} micro-batches"
    )
    yield from _memory_lines(step, device)
    if step.seconds is not None:
        yield from _time_lines(step.seconds, device)
    yield from _advice(plan)


def _memory_lines(step: Step, device: Device) -> Iterator[str]:
    memory = step.memory
    yield "memory     GiB, where every prompt is as long as the longest"
    for name in (
        "weights", "optimizer", "reference", "libraries", "features", "folded", "cache", "sampling",
        "gradients", "activations", "update",
    ):  # fmt: skip
        value = getattr(memory, name)
        if value:
            yield f"  {name:<12} {value / GIB:8.2f}  {_MEANING[name]}"
    yield f"  rollout      {memory.rollout / GIB:8.2f}  peak while sampling"
    yield f"  update       {memory.backward / GIB:8.2f}  peak in the update"
    yield f"  {device.name}: {device.usable / GIB:.1f} GiB usable"


_MEANING = {
    "weights": "model and adapters",
    "optimizer": "AdamW's moments",
    "reference": "the reference policy",
    "libraries": "what they take beside tensors",
    "features": "images, as the frozen vision tower sees them",
    "folded": "rollout: copies of weights that decoding is faster with",
    "cache": "rollout: keys and values",
    "sampling": "rollout: for a moment",
    "gradients": "update",
    "activations": "update: kept for the backward pass",
    "update": "update: for a moment",
}


def _time_lines(seconds: Phases, device: Device) -> Iterator[str]:
    parts = ", ".join(f"{name} {value:.3g} s" for name, value in vars(seconds).items())
    yield f"time       {seconds.total:.3g} s a step: {parts}"
    yield (
        f"           an estimate: median prompts, completions of full length, "
        f"{device.efficiency:.0%} of the rate of matrix products"
    )


def _advice(plan: Plan) -> Iterator[str]:
    if plan.fits:
        free = (plan.device.usable - plan.step.memory.peak) / GIB
        yield f"fits       yes, with {free:.1f} GiB to spare"
        more = "at least " if plan.largest_group == MOST_GENERATIONS else ""
        yield f"largest    rollout.num_generations: {more}{plan.largest_group:,}"
        yield f"           optim.max_tokens_per_batch: {plan.largest_batch:,}"
        return
    missing = (plan.step.memory.peak - plan.device.usable) / GIB
    yield f"fits       no: {missing:.1f} GiB are missing. Change, one after the other:"
    step = plan.step
    for text, step in plan.changes:
        yield f"  {text:<54} {step.memory.peak / GIB:8.2f} GiB"
    if step.memory.peak > plan.device.usable:
        yield "           not even then: take a larger device, a smaller model, or more devices"
        return
    yield f"           then optim.max_tokens_per_batch up to {plan.largest_batch:,}"
