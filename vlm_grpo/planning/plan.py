"""Estimates of steps, the search for the largest settings and for changes that fit, and the plan
as text, which ``vlm-grpo plan`` prints."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import combinations
from typing import Any, Literal, Self, get_args

from pydantic import ValidationError

from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS, VllmSettings
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.data.loading import filter_examples, load_run_task, load_split
from vlm_grpo.data.objects import NO_OBJECTS, Objects, Rows, TaskObject
from vlm_grpo.errors import UserError
from vlm_grpo.model.chat_template import ChatTemplate
from vlm_grpo.model.engine.batch import LOGIT_BYTES, fit_tokens
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.hub import load_known_models
from vlm_grpo.model.loading import get_pixel_budget, load_config, load_processor
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.planning.devices import (
    CARDS,
    CONTEXT,
    EFFICIENCY,
    GIB,
    Device,
    detect_device,
    find_device,
)
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
from vlm_grpo.planning.model_shape import measure_layers, read_model_shape
from vlm_grpo.planning.prompts import PromptCounter
from vlm_grpo.planning.sizes import ModelShape, PromptSize, Workload, estimate_workload
from vlm_grpo.planning.step_time import PhaseCosts, estimate_seconds

PCIE_BANDWIDTH = 25e9
"""Bytes per second between main memory and a GPU, assumed for PCIe 4.0 x16 (32 GB/s at most)."""
Weights = Literal["replicated", "sharded", "offloaded"]
"""How the weights are held: all on each device, sharded over the devices by FSDP2, or these shards
in main memory."""
HOST_LIBRARIES, WORKER, ROW = 900_000_000, 60_000_000, 1600
"""Bytes of main memory, measured on a CPU: of the training process with its libraries, of a process
that computes rewards, and of a row of the embedded data."""
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


@dataclass(frozen=True)
class Plan:
    """Memory and time of a recipe on a device; as text, the output of ``vlm-grpo plan``.

    Attributes:
        rows: number of rows of the training data; 0: prompts are assumed.
        changes: changes of settings that make the recipe fit, each in addition to those before it
            and with the resulting step; empty if the recipe fits.
        others: other ways of holding weights and moments and of sampling, each with its step.
        faster: a change that uses the memory that is left to shorten the step; None: there is none.
        wider: a step with four times as many completions of each prompt; None: it does not fit.
        smallest_card: memory in GB of the smallest common GPU that holds the unchanged recipe;
            None: none does.
    """

    device: Device
    num_devices: int
    rows: int
    step: StepEstimate
    changes: Sequence[Change]
    others: Sequence[Change]
    faster: Change | None
    wider: Change | None
    smallest_card: int | None

    @property
    def fits(self) -> bool:
        return self.device.holds(self.step.memory.peak)

    def __str__(self) -> str:
        return "\n".join(_format(self))


_DESCRIPTIONS = {
    "weights": "model and adapters",
    "optimizer": "the optimizer's state",
    "reference": "reference policy, or copies as teachers",
    "teacher": "teacher of distillation",
    "libraries": "libraries, besides tensors",
    "features": "outputs of the frozen vision tower",
    "folded": "rollout: copies of weights for faster decoding",
    "cache": "rollout: keys and values",
    "graphs": "rollout: captured decode steps",
    "sampling": "rollout: short-lived tensors",
    "gradients": "update: gradients",
    "activations": "update: saved for the backward pass",
    "update": "update: short-lived tensors",
    "stepping": "update: short-lived tensors of the optimizer's step",
    "server": "rollout: a vLLM server on this device",
    "resting": "update: what that server keeps",
}


def _format(plan: Plan) -> Iterator[str]:
    step, device = plan.step, plan.device
    shape, sizes = step.shape, step.prompts
    trained = f"{'LoRA, ' if shape.lora_rank else ''}{shape.num_trained:,} trained"
    yield f"model      {step.settings.model}: {shape.name}, {trained}, {shape.precision}"
    if shape.quantized_weights:
        size = shape.quantized_bytes / GIB
        held = f"{shape.quantized_weights:,} weights in {size:.2f} GiB"
        yield f"           policy.load_in={step.settings.policy.load_in}: {held}"
    data = f"{plan.rows:,} rows, {len(sizes):,} counted"
    yield f"data       {data if plan.rows else 'prompts with one image, assumed'}"
    for name, values in (
        ("image", sorted(size.image_tokens for size in sizes)),
        ("prompt", sorted(size.tokens for size in sizes)),
    ):
        shown = (values[0], values[len(values) // 2], values[-1])
        yield f"{name:<10} {' / '.join(f'{v:,}' for v in shown)} tokens (min / median / max)"
    work, group = step.work, step.settings.rollout.num_generations
    yield (
        f"step       {work.num_groups} prompts × {group} completions of "
        f"{work.completion_tokens} tokens per device; at most {work.update_tokens:,} tokens in "
        f"{work.num_micro_batches} micro-batches of at most {work.update_budget:,}"
    )
    if (longest := sizes[-1]).results:
        yield (
            f"           and up to {longest.results} results of {longest.result_tokens:,} tokens "
            f"per completion, {longest.result_images:,} of images, by the environment's preview"
        )
    yield from _format_memory(step, device)
    if not device.is_cpu:
        yield from _format_host(plan)
    if step.settings.rollout.vllm is not None:
        yield from _format_server(step, device)
    if step.seconds is not None:
        yield from _format_time(step.seconds)
    yield from _format_advice(plan)
    if plan.smallest_card is not None:
        yield f"card       {plan.smallest_card} GB is the smallest that holds it unchanged"


def _format_memory(step: StepEstimate, device: Device) -> Iterator[str]:
    memory = step.memory
    yield "memory     GiB, if every prompt is as long as the longest"
    for name, description in _DESCRIPTIONS.items():
        if value := getattr(memory, name):
            yield f"  {name:<12} {value / GIB:8.2f}  {description}"
    yield f"  rollout      {memory.rollout / GIB:8.2f}  peak while sampling"
    replaced = memory.first_gradients < memory.gradients
    note = ", where gradients replace what is saved" if replaced else ""
    if step.settings.policy.gradient_checkpointing == "auto":
        note += f", with policy.gradient_checkpointing={step.shape.checkpointing}"
    yield f"  update       {memory.backward / GIB:8.2f}  peak in the update{note}"
    reserved = f", {device.reserved:.0%} of its memory left to others" if device.reserved else ""
    if memory.copied:
        seconds = memory.copied / PCIE_BANDWIDTH
        yield (
            f"  {memory.copied / 1e9:.1f} GB per step between main memory and device: "
            f"{seconds:.2g} s at {PCIE_BANDWIDTH / 1e9:.0f} GB/s (PCIe 4.0 x16), partly overlapped"
        )
    yield f"  {device.name}: {device.usable / GIB:.1f} GiB usable{reserved}"


def _format_host(plan: Plan) -> Iterator[str]:
    held = count_host_bytes(plan.step, plan.rows)
    shown = (f"{name} {size / GIB:.1f}" for name, size in held.items() if size > GIB / 20)
    total, every = sum(held.values()) / GIB, ""
    if plan.num_devices > 1:
        every = f" per process, {plan.num_devices * total:.0f} of {plan.num_devices}"
    yield f"host       {total:.1f} GiB of main memory{every}: {', '.join(shown)}"


def count_host_bytes(step: StepEstimate, rows: int) -> dict[str, int]:
    """Count the bytes of main memory of a process that trains on a GPU, and of those it starts."""
    memory, work, rollout = step.memory, step.work, step.settings.rollout
    reference = work.uses_reference and work.reference_on_host
    return {
        "libraries": HOST_LIBRARIES,
        "rows": ROW * rows,
        "images of two steps": memory.inputs,
        "reference policy": memory.gradients * reference,
        "activations": memory.offloaded,
        "weights, gradients and optimizer": memory.host,
        "rewards' processes": WORKER * rollout.reward_workers,
        "weights of the sleeping server": step.shape.served_bytes * memory.server_sleeps,
    }


def _format_server(step: StepEstimate, device: Device) -> Iterator[str]:
    weights, vllm = step.shape.served_bytes, step.settings.rollout.vllm
    if server := step.memory.server:
        keys = max(0, server - weights - CONTEXT)
        yield f"server     {weights / GIB:.1f} GiB of weights, {keys / GIB:.1f} GiB for keys"
        if keys == 0:
            yield "           too little: raise rollout.vllm.gpu_memory_utilization"
    elif vllm is not None and vllm.python is not None:
        yield "server     its memory beside this process is not planned on a CPU"
    yield "time       not estimated with vLLM"


def _format_time(seconds: PhaseCosts) -> Iterator[str]:
    parts = ", ".join(f"{name} {value:.3g} s" for name, value in vars(seconds).items())
    yield f"time       {seconds.total:.3g} s per step: {parts}"
    yield (
        f"           an estimate for median prompts, completions of full length and "
        f"{EFFICIENCY:.0%} of the matmul rate"
    )


def _format_advice(plan: Plan) -> Iterator[str]:
    if plan.fits:
        free = (plan.device.usable - plan.step.memory.peak) / GIB
        yield f"fits       yes, with {free:.1f} GiB to spare"
        for name, change in (("faster", plan.faster), ("wider", plan.wider)):
            if change is not None:
                text, step = change
                cost = f"{step.memory.peak / GIB:8.2f} GiB{_compare(plan, step)}"
                yield f"{name:<10} {text:<43} {cost}"
        if plan.wider is not None:
            yield "           for prompts that are seldom answered right, on fewer of them per step"
        return
    missing = (plan.step.memory.peak - plan.device.usable) / GIB
    yield f"fits       no: {missing:.1f} GiB too large. Change in this order:"
    for text, step in plan.changes:
        host = f", {step.memory.host / GIB:.0f} of main memory each" if step.memory.host else ""
        yield f"  {text:<54} {step.memory.peak / GIB:8.2f} GiB{host}"
    if not plan.changes or not plan.device.holds(plan.changes[-1][1].memory.peak):
        more = "a larger device or a smaller model"
        if plan.num_devices == 1:
            more += ", or several devices: --devices 8 plans their sharing of the weights (FSDP2)"
        yield f"           not even then: use {more}"
        return
    for text, step in plan.others:
        fits = "fits" if plan.device.holds(step.memory.peak) else "too large"
        yield f"  or {step.memory.peak / GIB:.2f} GiB ({fits}): {text}"
    if plan.changes[-1][1].weights != "replicated":
        yield (
            f"           FSDP2: accelerate launch --config_file FOLDER/fsdp2.yaml --num_processes "
            f"{plan.num_devices} -m vlm_grpo.cli train …"
        )
        yield f"           FOLDER is {files('vlm_grpo.configs') / 'accelerate'}"


def _compare(plan: Plan, step: StepEstimate) -> str:
    if step.seconds is None or plan.step.seconds is None:
        return ""
    return f", {step.seconds.total:.3g} s instead of {plan.step.seconds.total:.3g}"


def plan(
    settings: Settings,
    gpu: str | None = None,
    devices: int = 1,
    weights: Weights = "replicated",
    reserved: float = 0.0,
    *,
    task: TaskObject | None = None,
    data: Rows | None = None,
) -> Plan:
    """Estimate the memory and time of a recipe; no weights are loaded.

    Args:
        gpu: a GPU's name, for example ``H100``, or its memory, for example ``24GB``; None: this
            machine's device.
        weights: how the weights are held.
        reserved: share of each device's memory that other processes use, such as a vLLM server.
        task, data: Python objects in place of those of the settings, as for ``train``.

    Raises:
        UserError: an argument is out of range, or the GPU is unknown; data, task or configuration
            cannot be loaded, or the configuration lacks a size; or there are more devices than
            prompts, or the weights cannot be held so.
    """
    return Planner(
        settings, choose_device(gpu, reserved), devices, weights, Objects(task, data)
    ).plan()


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

    def plan(self) -> Plan:
        step = self.estimate_step(self.settings)
        fits = self.device.holds(step.memory.peak)
        changes = [] if fits else list(suggest_changes(self, step))
        smallest = None if self.device.is_cpu else self.find_smallest_card()
        others = [] if fits else list(suggest_others(self, step, changes))
        faster = suggest_faster(self, step) if fits else None
        size = 4 * self.settings.rollout.num_generations
        wider = _change(self, step, "rollout", num_generations=size) if fits else None
        if wider is not None and not self.device.holds(wider[1].memory.peak):
            wider = None
        place = self.device, self.num_devices, self.num_rows
        return Plan(*place, step, changes, others, faster, wider, smallest)

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


MIN_PIXELS = 128 * 28 * 28  # the least that is suggested; below it images lose too much detail
OFFLOADING = "their shards in main memory (fsdp_offload_params)"  # of FSDP2's configuration
SHARDING = "weights sharded over the devices (FSDP2)"  # not a setting but another launch
Change = tuple[str, StepEstimate]
"""Settings as they are written on the command line, and the step with them."""
_Proposal = Callable[[Planner, StepEstimate], Change | None]


def suggest_changes(
    planner: Planner, step: StepEstimate, proposals: Sequence[_Proposal] | None = None
) -> Iterator[Change]:
    """Yield cumulative changes, each of which lowers the peak, with the resulting steps, until a
    step fits.

    A change that lowers nothing yet is tried again after those that do, and then with another one:
    both may lower one of two equal peaks, of the rollout and of the update.
    """
    left = list(CHANGES if proposals is None else proposals)
    while not planner.device.holds(step.memory.peak):
        groups = (group for size in (1, 2) for group in combinations(left, size))
        for group in groups:
            if (found := _apply(planner, step, group)) is not None:
                break
        else:
            return
        yield found
        step = found[1]
        for change in group:
            left.remove(change)


def _apply(planner: Planner, step: StepEstimate, group: Sequence[_Proposal]) -> Change | None:
    """Return valid settings with all of these changes, if they lower the peak."""
    texts, changed = [], step
    for change in group:
        if (found := change(planner, changed)) is None:
            return None
        texts.append(found[0])
        changed = found[1]
    if _is_valid(step.settings) and not _is_valid(changed.settings):
        return None
    return (" ".join(texts), changed) if changed.memory.peak < step.memory.peak else None


def suggest_others(
    planner: Planner, step: StepEstimate, changes: Sequence[Change]
) -> Iterator[Change]:
    """Yield other ways of holding weights and moments, and of sampling, with their steps: each in
    place of the others, and in addition to the free changes."""
    for _, changed in suggest_changes(planner, step, CHANGES[:FREE]):
        step = changed
    found = (_apply(planner, step, group) for group in EXCHANGES)
    known = [(change.settings, change.weights) for _, change in changes]
    yield from (c for c in found if c and (c[1].settings, c[1].weights) not in known)


def suggest_faster(planner: Planner, step: StepEstimate) -> Change | None:
    """Return a change that shortens the step with the memory that it leaves."""
    used = step.settings.policy.gradient_checkpointing
    parts = {"mlp": ("none",), "full": ("none", "mlp")}.get(used, ())
    found = (_change(planner, step, "policy", gradient_checkpointing=part) for part in parts)
    return next((c for c in found if planner.device.holds(c[1].memory.peak)), None)


def _is_valid(settings: Settings) -> bool:
    # Python objects in place of names, which it would not find, make none of them valid.
    try:
        Settings.model_validate_json(settings.model_dump_json(exclude_unset=True))
    except ValidationError:
        return False
    return True


def get_shape_key(policy: PolicySettings) -> str:
    """Return the policy's settings that change what ``Planner.read_shape`` returns."""
    return policy.model_dump_json(exclude=_COUNTED_LATER)


def with_changes(settings: Settings, block: str, **values: Any) -> Settings:
    return settings.model_copy(update={block: getattr(settings, block).model_copy(update=values)})


def _change(planner: Planner, step: StepEstimate, block: str, **values: Any) -> Change:
    texts = [f"{block}.{name}={str(value).lower()}" for name, value in values.items()]
    changed = with_changes(step.settings, block, **values)
    return " ".join(texts), planner.estimate_step(changed, step.weights)


def _reduce_batches(planner: Planner, step: StepEstimate) -> Change | None:
    work = step.work
    tokens = work.prompt_tokens + work.num_generations * (work.path_tokens - 1)
    if tokens >= work.update_budget:
        return None
    return _change(planner, step, "optim", max_tokens_per_batch=tokens)


def _reduce_rollouts(planner: Planner, step: StepEstimate) -> Change | None:
    work = step.work
    tokens = work.prompt_tokens + work.num_generations * work.path_tokens
    is_elsewhere = step.settings.rollout.vllm is not None
    if is_elsewhere or tokens >= work.rollout_budget or planner.device.holds(step.memory.rollout):
        return None
    return _change(planner, step, "rollout", max_tokens_per_batch=tokens)


def _use_checkpointing(planner: Planner, step: StepEstimate) -> Change | None:
    used = step.settings.policy.gradient_checkpointing
    parts = {"none": ("mlp", "full"), "mlp": ("full",)}.get(used, ())
    changes = [_change(planner, step, "policy", gradient_checkpointing=part) for part in parts]
    fitting = (change for change in changes if planner.device.holds(change[1].memory.peak))
    return next(fitting, changes[-1] if changes else None)


def _shard(planner: Planner, step: StepEstimate) -> Change | None:
    settings = step.settings
    is_whole = settings.optim.name != "adamw" or settings.policy.activation_offloading
    if planner.num_devices == 1 or step.weights != "replicated" or is_whole:
        return None
    return SHARDING, planner.estimate_step(step.settings, "sharded")


def _has_moments(step: StepEstimate) -> bool:
    is_full = not step.shape.lora_rank and step.weights == "replicated"
    return is_full and step.settings.optim.name == "adamw"


def _offload_activations(planner: Planner, step: StepEstimate) -> Change | None:
    if planner.device.is_cpu or step.weights != "replicated" or step.shape.offloads:
        return None
    return _change(planner, step, "policy", activation_offloading=True)


def _offload(planner: Planner, step: StepEstimate) -> Change | None:
    if step.weights != "sharded":
        return None
    return OFFLOADING, planner.estimate_step(step.settings, "offloaded")


def _sample_elsewhere(planner: Planner, step: StepEstimate) -> Change | None:
    is_small = planner.device.holds(step.memory.rollout)
    if planner.device.is_cpu or step.settings.rollout.vllm is not None or is_small:
        return None
    vllm = VllmSettings(urls=("http://HOST:8000",))
    new = with_changes(step.settings, "rollout", sampler="vllm", vllm=vllm)
    text = "rollout.sampler=vllm rollout.vllm.urls=[http://HOST:8000]"
    return text, planner.estimate_step(new, step.weights)


def _use_adapters(planner: Planner, step: StepEstimate) -> Change | None:
    if step.settings.policy.lora is not None:
        return None
    new = with_changes(step.settings, "policy", lora=LoraSettings(), freeze=())
    rollout = planner.settings.rollout
    new = with_changes(new, "optim", lr=1e-5)
    new = with_changes(new, "rollout", sampler=rollout.sampler, vllm=rollout.vllm)
    # The rollout needs the full base weights on each device, so that sharding them saves little.
    is_alone = step.weights == "replicated" and step.settings.rollout.vllm == rollout.vllm
    note = "" if is_alone else " (without FSDP2 and another sampler)"
    return f"policy.lora.r=64 optim.lr=1e-5{note}", planner.estimate_step(new, "replicated")


def _can_quantize(step: StepEstimate) -> bool:
    policy = step.settings.policy
    return bool(policy.lora) and policy.load_in == "none" and step.weights == "replicated"


def _halve_pixels(planner: Planner, step: StepEstimate) -> Change | None:
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


_use_small_moments = _set(_has_moments, "optim", name="adamw_8bit")
_use_small_masters = _set(
    lambda s: s.shape.precision == "autocast", "policy", master_weights="bfloat16"
)
FREE = 4  # so many of the changes do not change what is trained, or how
# In this order: free changes, changes that cost time, changes of the training, smaller images.
CHANGES: tuple[_Proposal, ...] = (
    _reduce_batches,
    _reduce_rollouts,
    _set(
        lambda s: s.shape.shares_prompts and not 0 < s.settings.policy.head_chunk_tokens <= 256,
        "policy",
        head_chunk_tokens=256,
    ),
    _use_checkpointing,
    _shard,
    # Their moments and activations cannot be sharded.
    _use_small_moments,
    _offload_activations,
    _offload,
    _sample_elsewhere,
    _set(lambda s: s.settings.policy.dtype != "bfloat16", "policy", dtype="bfloat16"),
    _set(
        lambda s: s.settings.objective.needs_reference,
        "objective",
        beta=0.0,
        reference_refresh_every=1,
    ),
    _use_adapters,
    _set(_can_quantize, "policy", load_in="4bit"),
    _halve_pixels,
    _halve_pixels,
)
EXCHANGES: tuple[tuple[_Proposal, ...], ...] = (
    (_use_small_moments,),
    (_use_small_moments, _use_small_masters),
    (_shard, _offload),
    (_shard, _sample_elsewhere),
    (_shard, _use_small_masters),
    (_shard, _use_small_masters, _sample_elsewhere),
)
