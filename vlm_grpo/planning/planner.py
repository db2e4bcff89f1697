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
from vlm_grpo.planning.devices import GIB, Device
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


def lines(planner: Planner) -> Iterator[str]:
    """The plan, line by line."""
    step, device = planner.step(planner.settings), planner.device
    shape, sizes = step.shape, step.prompts
    share = f"LoRA, {shape.trained:,} trained" if shape.rank else f"{shape.trained:,} trained"
    yield f"model      {planner.settings.model}: {shape.name}, {share}, {shape.precision}"
    yield f"data       {planner.prompts.rows:,} rows, {len(sizes):,} counted"
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
    yield from _advice(planner, step)


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


def _advice(planner: Planner, step: Step) -> Iterator[str]:
    if step.memory.peak <= planner.device.usable:
        free = (planner.device.usable - step.memory.peak) / GIB
        yield f"fits       yes, with {free:.1f} GiB to spare"
        group = planner.largest_group()
        more = "at least " if group == MOST_GENERATIONS else ""
        yield f"largest    rollout.num_generations: {more}{group:,}"
        yield f"           optim.max_tokens_per_batch: {planner.largest_batch():,}"
        return
    missing = (step.memory.peak - planner.device.usable) / GIB
    yield f"fits       no: {missing:.1f} GiB are missing. Change, one after the other:"
    last = step
    for text, last in planner.remedies():
        yield f"  {text:<54} {last.memory.peak / GIB:8.2f} GiB"
    if last.memory.peak > planner.device.usable:
        yield "           not even then: take a larger device, a smaller model, or more devices"
        return
    batch = planner.largest_batch(last.settings)
    yield f"           then optim.max_tokens_per_batch up to {batch:,}"
