"""Check a model: compare the shared prompt pass with the repeated one, and time both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.data import PILLOW_WARNS_AT
from vlm_grpo.config.run import Settings
from vlm_grpo.deploy.predict import read_image
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.media.images import encode_png
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.engine.sampling import SamplingSettings, build_sampling_distribution
from vlm_grpo.model.families import Family
from vlm_grpo.model.loading import load_model
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import PlainQuestion
from vlm_grpo.types import Completion, Example, Prompt

QUESTION = "What is in the image? Describe every object in a few words."
GROUP_SIZE = 4
COMPLETION_LENGTH = 16


@dataclass(frozen=True)
class _Measurement:
    """Results of one form: seconds, log-probabilities, and the gradient of their sum."""

    rollout_seconds: float
    update_seconds: float
    logprobs: Tensor
    gradient: dict[str, Tensor]


def diagnose(model: str, image: Path | None = None, dtype: str = "float32") -> Iterator[str]:
    """Load a model, run both forms on one prompt, and yield the lines of a report.

    Args:
        model: folder of a model, hub name, or ``embedded``.
        image: image of the prompt; None: noise of 448 × 448 pixels.
        dtype: ``float32`` or ``bfloat16``.

    Raises:
        UserError: the model or the image cannot be loaded.
    """
    disable_progress_bar()
    settings = Settings.model_validate(
        {
            "task": "doctor",
            "model": model,
            "data": {"train": "none"},
            "policy": {"dtype": dtype},
            "rollout": {"num_generations": GROUP_SIZE, "min_new_tokens": COMPLETION_LENGTH},
        }
    )
    loaded = load_model(settings, training=False)
    loaded.model.to(initialize_distributed().device)
    distribution = build_sampling_distribution(
        loaded.model, loaded.processor, loaded.family, settings.rollout
    )
    policy = Policy(loaded, distribution)
    config = loaded.model.config
    weights = sum(weight.numel() for weight in loaded.model.parameters())
    yield f"model        {model}: {config.model_type}, {weights:,} weights, {dtype}"
    family = type(loaded.family)
    name = "none of the known ones" if family is Family else family.__name__
    yield f"family       {name}, coordinate frame {policy.prompts.frame.name!r}"
    if loaded.budget is not None:
        low, high = loaded.budget.min_pixels, loaded.budget.max_pixels
        yield f"pixel budget {low:,} to {high:,} pixels per image"
    example = policy.prompts.with_resized_sizes(_build_example(image))
    prompt = policy.prompts.build(example, PlainQuestion())
    (reference,) = example.images
    image_tokens = sum(token in distribution.banned for token in prompt.token_ids)
    (width, height), resized = reference.size, ""
    if loaded.budget is not None:  # else the processor decides
        resized = ", resized to {} × {}".format(*reference.resized_size)
    yield (
        f"image        {width} × {height} pixels{resized}; "
        f"{len(prompt.token_ids)} prompt tokens, {image_tokens} of them for the image"
    )
    reason = loaded.family.why_not_shared(config)
    if reason is None and (problem := policy.try_form(prompt).shared) is not None:
        reason = f"with a shared prompt, {problem}"
    if reason is not None:
        yield f"form         one prompt pass per completion: {reason}"
        return
    yield from _compare_forms(policy, policy.view(repeated=True), prompt)


def _compare_forms(shared: Policy, repeated: Policy, prompt: Prompt) -> Iterator[str]:
    """Yield how far the results of two policies over one model differ, and their speed."""
    seconds, group = _time_rollout(shared, prompt)
    batch = _build_batch(prompt, group)  # both forms score the same completions
    ours = _Measurement(seconds, *_time_update(shared, batch))
    seconds, _ = _time_rollout(repeated, prompt)
    plain = _Measurement(seconds, *_time_update(repeated, batch))
    largest = float((ours.logprobs - plain.logprobs).abs().max())
    yield f"log-probs    largest difference of the two forms: {largest:.1e} nats"
    yield f"gradient     relative difference {_relative_distance(ours, plain):.1e}"
    for name, a, b in (
        ("rollout", ours.rollout_seconds, plain.rollout_seconds),
        ("update", ours.update_seconds, plain.update_seconds),
    ):
        yield f"{name:<12} {a:.2f} s shared, {b:.2f} s repeated ({b / a:.1f} times)"
    yield f"attention    {shared.describe_engine()}"
    yield f"form         one prompt pass per group of {GROUP_SIZE} (policy.engine=auto)"


def _build_example(image: Path | None) -> Example:
    noise = np.random.default_rng(0).integers(0, 256, (448, 448, 3), dtype=np.uint8)
    source = encode_png(Image.fromarray(noise)) if image is None else image
    return Example("doctor", (read_image(source, PILLOW_WARNS_AT),), QUESTION, "")


def _time_rollout(policy: Policy, prompt: Prompt) -> tuple[float, tuple[Completion, ...]]:
    """Return the seconds of the second of two rollouts, and its completions."""
    sampling = SamplingSettings(policy.distribution, COMPLETION_LENGTH)
    seconds, group = 0.0, ()
    for _ in range(2):
        policy.engine.clear_image_features()
        start = time.perf_counter()
        (group,) = policy.sample([prompt], sampling, GROUP_SIZE, [(0,)], 1 << 30)
        seconds = time.perf_counter() - start
    return seconds, group


def _build_batch(prompt: Prompt, group: tuple[Completion, ...]) -> MicroBatch:
    """Truncate the completions to different lengths, as in a real group."""
    tokens = tuple(c.token_ids[: len(c.token_ids) - i] for i, c in enumerate(group))
    return MicroBatch((GroupSlice(prompt, tokens, tuple(range(len(group)))),))


def _time_update(policy: Policy, batch: MicroBatch) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return the seconds of the second of two backward passes, the log-probs and the gradient."""
    seconds, logprobs = 0.0, torch.zeros(0)
    for _ in range(2):
        policy.model.zero_grad()
        policy.engine.clear_image_features()
        start = time.perf_counter()
        logprobs = policy.score(batch).logprobs
        logprobs.sum().backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    gradient = {n: w.grad.cpu() for n, w in policy.trainable_parameters() if w.grad is not None}
    policy.model.zero_grad()
    return seconds, logprobs.detach(), gradient


def _relative_distance(ours: _Measurement, plain: _Measurement) -> float:
    """Return the norm of the difference of the gradients over the norm of the repeated one."""
    a, b = ours.gradient, plain.gradient
    difference = sum(float((a[name] - b[name]).double().square().sum()) for name in b)
    return (difference / sum(float(g.double().square().sum()) for g in b.values())) ** 0.5
