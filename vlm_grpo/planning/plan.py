"""The plan of a recipe, and its text, which ``vlm-grpo plan`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from vlm_grpo.config.run import Settings
from vlm_grpo.data.objects import Objects, Rows, TaskObject
from vlm_grpo.planning.devices import CONTEXT, EFFICIENCY, GIB, Device
from vlm_grpo.planning.planner import Planner, StepEstimate, Weights, choose_device
from vlm_grpo.planning.step_time import PhaseCosts
from vlm_grpo.planning.suggestions import (
    Change,
    suggest_changes,
    suggest_faster,
    suggest_others,
    suggest_wider,
)

PCIE_BANDWIDTH = 25e9
"""Bytes per second between main memory and a GPU, assumed for PCIe 4.0 x16 (32 GB/s at most)."""
HOST_LIBRARIES, WORKER, ROW = 900_000_000, 60_000_000, 1600
"""Bytes of main memory, measured on a CPU: of the training process with its libraries, of a process
that computes rewards, and of a row of the embedded data."""


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
    device = choose_device(gpu, reserved)
    return build_plan(Planner(settings, device, devices, weights, Objects(task, data)))


def build_plan(planner: Planner) -> Plan:
    """Return the plan of the planner's recipe on its device, with changes that help."""
    step = planner.estimate_step(planner.settings)
    fits = planner.device.holds(step.memory.peak)
    changes = [] if fits else list(suggest_changes(planner, step))
    smallest = None if planner.device.is_cpu else planner.find_smallest_card()
    others = [] if fits else list(suggest_others(planner, step, changes))
    faster = suggest_faster(planner, step) if fits else None
    wider = suggest_wider(planner, step) if fits else None
    place = planner.device, planner.num_devices, planner.num_rows
    return Plan(*place, step, changes, others, faster, wider, smallest)
