"""The plan of a recipe, and its text, which ``vlm-grpo plan`` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from vlm_grpo.config.run import Settings
from vlm_grpo.planning.devices import CONTEXT, GIB, Device
from vlm_grpo.planning.memory import Memory
from vlm_grpo.planning.shape import ModelShape
from vlm_grpo.planning.step_time import PhaseCosts
from vlm_grpo.planning.workload import PromptSize, Workload

PCIE_BANDWIDTH = 25e9
"""Bytes per second between main memory and a GPU, assumed for PCIe 4.0 x16 (32 GB/s at most)."""
MAX_GENERATIONS = 1024
"""The largest group that is tried."""
Weights = Literal["replicated", "sharded", "offloaded"]
"""How the weights are held: all on each device, sharded over the devices by FSDP2, or these shards
in main memory."""


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
        largest_group: the largest ``rollout.num_generations`` that fits; 0 if not even 2 fits.
        changes: changes of settings that make the recipe fit, each in addition to those before it
            and with the resulting step; empty if the recipe fits.
        largest_batch: the largest useful ``optim.max_tokens_per_batch`` that fits after the
            changes; 0 if the recipe does not fit even with them.
        largest_image: the largest ``policy.max_pixels`` that fits if all images fill it; 0 if none
            does, or the processor has no pixel budget.
        smallest_card: memory in GB of the smallest common GPU that holds the unchanged recipe;
            None: none does.
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
        return "\n".join(_format(self))


_DESCRIPTIONS = {
    "weights": "model and adapters",
    "optimizer": "the optimizer's state",
    "reference": "reference policy",
    "teacher": "teacher of distillation",
    "libraries": "libraries, besides tensors",
    "features": "outputs of the frozen vision tower",
    "folded": "rollout: copies of weights for faster decoding",
    "cache": "rollout: keys and values",
    "sampling": "rollout: short-lived tensors",
    "gradients": "update: gradients",
    "activations": "update: saved for the backward pass",
    "update": "update: short-lived tensors",
    "stepping": "update: short-lived tensors of the optimizer's step",
    "server": "rollout: a vLLM server on this device",
    "resting": "update: what that server keeps",
    "offloaded": "update: saved in main memory, not on the device",
    "host": "weights, optimizer and gradients in main memory, not on the device",
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
        ("prompt", [size.tokens for size in sizes]),
    ):
        shown = (values[0], values[len(values) // 2], values[-1])
        yield f"{name:<10} {' / '.join(f'{v:,}' for v in shown)} tokens (min / median / max)"
    work, group = step.work, step.settings.rollout.num_generations
    yield (
        f"step       {work.num_groups} prompts × {group} completions of "
        f"{work.completion_tokens} tokens per device; at most {work.update_tokens:,} tokens in "
        f"{work.num_micro_batches} micro-batches"
    )
    yield from _format_memory(step, device)
    if step.settings.rollout.vllm is not None:
        yield from _format_server(step, device)
    if step.seconds is not None:
        yield from _format_time(step.seconds, device)
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
    yield f"  update       {memory.backward / GIB:8.2f}  peak in the update{note}"
    reserved = f", {device.reserved:.0%} of its memory left to others" if device.reserved else ""
    if memory.copied:
        seconds = memory.copied / PCIE_BANDWIDTH
        yield (
            f"  {memory.copied / 1e9:.1f} GB per step between main memory and device: "
            f"{seconds:.2g} s at {PCIE_BANDWIDTH / 1e9:.0f} GB/s (PCIe 4.0 x16), partly overlapped"
        )
    yield f"  {device.name}: {device.usable / GIB:.1f} GiB usable{reserved}"


def _format_server(step: StepEstimate, device: Device) -> Iterator[str]:
    weights, vllm = step.shape.served_bytes, step.settings.rollout.vllm
    if server := step.memory.server:
        keys = server - weights - CONTEXT
        sizes = f"{weights / GIB:.1f} GiB of weights, {max(keys, 0) / GIB:.1f} GiB for keys"
        yield f"server     {sizes}"
        if keys <= 0:
            yield "           too little: raise rollout.vllm.gpu_memory_utilization"
    elif vllm is not None and vllm.python is not None:
        yield "server     its memory beside this process is not planned on a CPU"
    yield "time       not estimated with vLLM"


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
        if plan.largest_image:
            yield f"           policy.max_pixels: {plan.largest_image}, if all images fill it"
        return
    missing = (plan.step.memory.peak - plan.device.usable) / GIB
    yield f"fits       no: {missing:.1f} GiB too large. Change in this order:"
    for text, step in plan.changes:
        yield f"  {text:<54} {step.memory.peak / GIB:8.2f} GiB"
    if plan.largest_batch == 0:
        more = "a larger device or a smaller model"
        if plan.num_devices == 1:
            more += ", or several devices: --devices 8 plans their sharing of the weights (FSDP2)"
        yield f"           not even then: use {more}"
        return
    yield f"           then optim.max_tokens_per_batch up to {plan.largest_batch:,}"
    if plan.changes[-1][1].weights == "sharded":
        yield (
            f"           FSDP2: accelerate launch --config_file FOLDER/fsdp2.yaml --num_processes "
            f"{plan.num_devices} -m vlm_grpo.cli train …"
        )
        yield f"           FOLDER is {files('vlm_grpo.configs') / 'accelerate'}"
