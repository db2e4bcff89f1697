"""FLOPs of a step by phase, and the seconds that a device needs for them.

A linear module with w weights takes 2w FLOPs per token. Its backward pass takes 2w for the gradient
of the input, and another 2w for the gradient of the weights if they are trained. Attention takes 4q
FLOPs per query of width q and key: half for the scores, half for the weighted sum of the values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vlm_grpo.model.engine.packing import GroupSlice
from vlm_grpo.planning.devices import EFFICIENCY, Device
from vlm_grpo.planning.sizes import ModelShape, Workload
from vlm_grpo.types import Group, Prompt


@dataclass(frozen=True)
class PhaseCosts:
    """FLOPs, or seconds, of a step by phase."""

    vision: float
    prefill: float
    decode: float
    update: float

    @property
    def total(self) -> float:
        return self.vision + self.prefill + self.decode + self.update


def count_flops(model: ModelShape, work: Workload) -> PhaseCosts:
    """Return the FLOPs of a step on one device with completions of full length."""
    text = model.text
    head = 2 * text.hidden * text.vocabulary
    completions = work.num_prompts * work.num_generations
    encoding = work.num_prompts * count_vision_flops(model, work.patches)
    encoding += completions * work.results * count_vision_flops(model, work.result_patches)
    prompt = count_token_flops(model, 0, work.prompt_tokens)
    input_tokens = work.completion_tokens - 1  # the last token is never an input
    cached = work.prompt_tokens + work.observed_tokens
    decoding = count_token_flops(model, cached, input_tokens)
    observing = count_token_flops(model, work.prompt_tokens, work.observed_tokens)
    rollout = completions * (decoding + head * work.completion_tokens)
    path = work.num_generations * (work.path_tokens - 1)
    packed_once = work.num_prompts * (work.prompt_tokens + path)
    repeats = work.update_tokens / packed_once
    forward = repeats * (work.num_prompts * prompt + completions * (decoding + observing))
    backward = (2 if model.lora_rank else 3) + model.recomputed_share(text)
    scoring = completions * work.completion_tokens * head * (2 if model.head_frozen else 4)
    update = forward * backward + scoring
    taught = work.teacher_weights / model.num_weights
    vision = encoding * (work.views + taught + work.extra_passes)
    if model.trains_vision:
        recomputed = model.recomputed_share(model.vision)
        vision += work.iterations * repeats * encoding * (3 + recomputed)
    elif not model.shares_prompts:  # features are not kept
        vision += (work.iterations + work.uses_reference) * encoding
    # The reference, the old log-probs of all mini-batches but the first, and those of methods.
    passes = work.uses_reference + 1 - 1 / work.mini_batches + taught + work.extra_passes
    passed = passes * (forward + completions * work.completion_tokens * head)
    prefill = work.views * work.num_prompts * prompt
    for turn in range(1, work.results + 1):  # each turn begins with a pass over what is before it
        before = turn * (work.completion_tokens // (work.results + 1) + work.result_tokens)
        again = count_token_flops(model, work.prompt_tokens, before)
        prefill += work.num_prompts * prompt + completions * again
    return PhaseCosts(vision, prefill, rollout, work.iterations * update + passed)


def count_step_flops(
    model: ModelShape, groups: Sequence[Group], slices: Sequence[GroupSlice], iterations: int = 1
) -> PhaseCosts:
    """Return the FLOPs that a step needs, with each prompt once per group.

    Those of gradient checkpointing, a reference policy and replaced groups are not included, as in
    the model FLOPs utilization of PaLM (Chowdhery et al., 2022, arXiv:2204.02311, appendix B).
    Only the completions of ``slices`` have a gradient.
    """
    head = 2 * model.text.hidden * model.text.vocabulary
    vision = prefill = decode = update = 0.0
    for group in groups:
        prompt = len(group.prompt.token_ids)
        lengths = [len(completion.token_ids) for completion in group.completions]
        vision += _count_image_flops(model, group.prompt)
        prefill += count_token_flops(model, 0, prompt)
        decode += head * sum(lengths) + _count_group_flops(model, prompt, lengths)
    for piece in slices:
        # Equal completions are passed once where the slice has trunks.
        own = dict.fromkeys(piece.completions) if piece.trunks else piece.completions
        prompt, lengths = len(piece.prompt.token_ids), [*map(len, own)]
        forward = count_token_flops(model, 0, prompt) + _count_group_flops(model, prompt, lengths)
        update += forward * (2 if model.lora_rank else 3)
        update += head * sum(lengths) * (2 if model.head_frozen else 3)
        if model.trains_vision:
            update += 3 * _count_image_flops(model, piece.prompt)
    return PhaseCosts(vision, prefill, decode, iterations * update)


def _count_image_flops(model: ModelShape, prompt: Prompt) -> float:
    # The tower takes two frames of a clip as an image.
    images = sum(max(1, math.ceil(image.num_frames / 2)) for image in prompt.example.images)
    if not images:
        return 0.0
    pixels = (v for name, v in prompt.vision.items() if name.startswith("pixel_values"))
    patches = sum(values.numel() for values in pixels) // model.vision.patch_values
    return images * count_vision_flops(model, patches // images)


def count_vision_flops(model: ModelShape, patches: int) -> float:
    """Return the FLOPs of one pass of the vision tower over an image."""
    vision = model.vision
    window = min(vision.window or patches, patches)
    windowed_layers = vision.layers - vision.full_attention_layers
    keys = vision.full_attention_layers * patches + windowed_layers * window
    merged = vision.hidden * vision.merge
    merger = 2 * merged * (merged + model.text.hidden) * patches / vision.merge
    linear = 2 * (vision.layers * vision.layer_weights + vision.patch_values * vision.hidden)
    return patches * (linear + 4 * vision.hidden * keys) + merger


def count_token_flops(model: ModelShape, cached: int, tokens: int) -> float:
    """Return the FLOPs of a causal pass of the decoder layers over tokens after cached ones."""
    text, keys = model.text, cached + (tokens + 1) / 2
    linear = 2 * (text.weights_per_token + model.lora_rank * text.adapter_widths)
    return text.layers * tokens * (linear + 4 * text.query * keys)


def _count_group_flops(model: ModelShape, prompt: int, lengths: Sequence[int]) -> float:
    # The last token of a completion is never an input.
    return sum(count_token_flops(model, prompt, length - 1) for length in lengths)


def estimate_seconds(model: ModelShape, work: Workload, device: Device) -> PhaseCosts | None:
    """Return the seconds of a step, or None if the device's rates are unknown."""
    if device.rates is None:
        return None
    flops, text = count_flops(model, work), model.text
    rate = EFFICIENCY * device.rates["float32" if model.precision == "float32" else "bfloat16"]
    token_steps = -(-work.num_prompts // work.concurrent_prompts) * work.completion_tokens
    # Weights, keys and values are read for every token.
    weights = text.layers * text.layer_weights + text.hidden * text.vocabulary
    path = work.completion_tokens / 2 + work.observed_tokens
    later = work.results / (work.results + 1)  # share of the turns in which each has the prompt
    prompts = 1 + (work.num_generations - 1) * later
    cached_tokens = work.prompt_tokens * prompts + work.num_generations * path
    cache = 2 * text.layers * text.key * work.concurrent_prompts * cached_tokens
    reading = token_steps * (weights + cache) * model.value_bytes / device.bandwidth
    computing = flops.decode / rate
    launching = token_steps * text.layers * device.layer_seconds
    return PhaseCosts(
        flops.vision / rate,
        flops.prefill / rate,
        max(reading, computing, launching),
        flops.update / rate,
    )
