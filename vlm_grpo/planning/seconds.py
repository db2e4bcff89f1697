"""FLOP of a step by phase, and the seconds that a device will take for them.

A linear map of w weights costs 2w FLOP a token; its backward pass costs the same for the gradient
of its input, and again for that of its weights where they are trained. Attention costs 4q FLOP for
each key that a query of width q meets: half for the products with the keys, half with the values.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_grpo.planning.devices import Device
from vlm_grpo.planning.shape import ModelShape
from vlm_grpo.planning.work import Work


@dataclass(frozen=True)
class Phases:
    """FLOP, or seconds, of a step by phase."""

    vision: float
    prefill: float
    decode: float
    update: float

    @property
    def total(self) -> float:
        return self.vision + self.prefill + self.decode + self.update


def count_flops(model: ModelShape, work: Work) -> Phases:
    """FLOP of a step on one device; every completion has the full length."""
    text = model.text
    head = 2 * text.hidden * text.vocabulary
    completions = work.prompts * work.group
    encoding = work.prompts * vision_flops(model, work.patches)
    prompt = prompt_flops(model, work.prompt)
    fed = work.completion - 1
    decoding = completion_flops(model, work.prompt, fed)
    rollout = completions * (decoding + head * work.completion)
    repeats = work.update_tokens / (work.prompts * (work.prompt + work.group * fed))
    forward = repeats * (work.prompts * prompt + completions * decoding)
    backward = (2 if model.rank else 3) + model.checkpointing
    scored = completions * work.completion * head * (2 if model.head_frozen else 4)
    update = forward * backward + scored
    vision = encoding
    if model.trains_vision:
        vision += work.iterations * repeats * encoding * (3 + model.checkpointing)
    reference = forward + completions * work.completion * head if work.reference else 0
    return Phases(vision, work.prompts * prompt, rollout, work.iterations * update + reference)


def vision_flops(model: ModelShape, patches: int) -> float:
    """One pass of the vision tower over the patches of one image."""
    vision = model.vision
    window = min(vision.window or patches, patches)
    met = vision.full * patches + (vision.layers - vision.full) * window
    merged = vision.hidden * vision.merge
    merger = 2 * merged * (merged + model.text.hidden) * patches / vision.merge
    linear = 2 * (vision.layers * vision.layer_weights + vision.patch_values * vision.hidden)
    return patches * (linear + 4 * vision.hidden * met) + merger


def prompt_flops(model: ModelShape, tokens: int) -> float:
    """One causal pass of the decoder layers over a prompt."""
    text = model.text
    return text.layers * tokens * (_layer(model) + 4 * text.query * (tokens + 1) / 2)


def completion_flops(model: ModelShape, prompt: int, tokens: int) -> float:
    """The decoder layers over the tokens of a completion, behind a prompt that is kept."""
    text = model.text
    return text.layers * tokens * (_layer(model) + 4 * text.query * (prompt + (tokens + 1) / 2))


def _layer(model: ModelShape) -> float:
    """FLOP of a layer's linear maps for one token, its adapters' among them."""
    text = model.text
    return 2 * (text.layer_weights + model.rank * text.adapter_widths)


def estimate_seconds(model: ModelShape, work: Work, device: Device) -> Phases | None:
    """Seconds of a step; None where the device's rates are not known."""
    if device.rates is None:
        return None
    flops = count_flops(model, work)
    rate = device.rates["float32" if model.precision == "float32" else "bfloat16"]
    long = rate * device.efficiency
    read = _decoded_bytes(model, work) / device.bandwidth
    computed = flops.decode / (rate * device.decode_efficiency)
    rounds = -(-work.prompts // work.slots) * work.completion
    started = rounds * model.text.layers * device.layer_seconds
    return Phases(
        flops.vision / long,
        flops.prefill / long,
        max(read, computed, started),
        flops.update / long,
    )


def _decoded_bytes(model: ModelShape, work: Work) -> float:
    """Bytes that decoding reads: the weights at every step, keys and values of every slot."""
    text = model.text
    rounds = -(-work.prompts // work.slots)
    weights = text.layers * text.layer_weights + text.hidden * text.vocabulary
    held = work.prompt + work.group * work.completion / 2
    cache = 2 * text.layers * text.key * work.slots * held
    return rounds * work.completion * (weights + cache) * model.value_bytes
