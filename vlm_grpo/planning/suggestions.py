"""Changes of settings that make a recipe fit, or faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from vlm_grpo.config.policy import LoraSettings
from vlm_grpo.config.rollout import VllmSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.planning.planner import Planner, StepEstimate, with_changes

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


def suggest_wider(planner: Planner, step: StepEstimate) -> Change | None:
    """Return the step with four times as many completions of each prompt, if it fits."""
    size = 4 * planner.settings.rollout.num_generations
    wider = _change(planner, step, "rollout", num_generations=size)
    return wider if planner.device.holds(wider[1].memory.peak) else None


def _is_valid(settings: Settings) -> bool:
    # Python objects in place of names, which it would not find, make none of them valid.
    try:
        Settings.model_validate_json(settings.model_dump_json(exclude_unset=True))
    except ValidationError:
        return False
    return True


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
