"""Changes that let a recipe fit on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vlm_grpo.config.policy import LoraSettings
from vlm_grpo.config.run import Settings

if TYPE_CHECKING:
    from vlm_grpo.planning.search import StepEstimate, StepPlanner

MIN_PIXELS = 128 * 28 * 28
"""Smallest pixel budget that is suggested; below it images lose too much detail."""
SHARDING = "weights sharded over the devices (FSDP2)"
"""The change that is not a setting but another launch."""

Change = tuple[str, "StepEstimate"]
"""Settings as they are written on the command line, and the step with them."""


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
    """Return the settings with changed values in one block."""
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


def _reduce_chunks(planner: StepPlanner, step: StepEstimate) -> Change | None:
    if not step.shape.shares_prompts or 0 < step.settings.policy.head_chunk_tokens <= 256:
        return None
    return _change(planner, step, "policy", head_chunk_tokens=256)


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


def _use_bfloat16(planner: StepPlanner, step: StepEstimate) -> Change | None:
    if step.settings.policy.dtype == "bfloat16":
        return None
    return _change(planner, step, "policy", dtype="bfloat16")


def _drop_reference(planner: StepPlanner, step: StepEstimate) -> Change | None:
    if not step.settings.objective.needs_reference:
        return None
    return _change(planner, step, "objective", beta=0.0, reference_refresh_every=1)


def _use_four_bits(planner: StepPlanner, step: StepEstimate) -> Change | None:
    policy = step.settings.policy
    if policy.lora is None or policy.load_in != "none" or step.weights != "replicated":
        return None
    return _change(planner, step, "policy", load_in="4bit")


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


# In this order: free changes, changes that cost time, changes of the training, smaller images.
_CHANGES: tuple[Callable[[StepPlanner, StepEstimate], Change | None], ...] = (
    _reduce_batches,
    _reduce_rollouts,
    _reduce_chunks,
    _use_checkpointing,
    _shard,
    _use_bfloat16,
    _drop_reference,
    _use_adapters,
    _use_four_bits,
    _halve_pixels,
    _halve_pixels,
)
