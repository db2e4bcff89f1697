"""Check a model: compare the shared prompt pass with the repeated one, and time both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.data import PILLOW_WARNS_AT
from vlm_grpo.config.run import Settings
from vlm_grpo.data.images import MediaReader
from vlm_grpo.media.images import encode_png
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.engine.sampling import SamplingSettings, build_sampling_distribution
from vlm_grpo.model.loading import load_model
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import PlainQuestion
from vlm_grpo.types import Example, ImageRef, Prompt

QUESTION = "What is in the image? Describe every object in a few words."
GROUP_SIZE = 4
COMPLETION_LENGTH = 16


def diagnose(
    model: str, image: ImageRef | None = None, dtype: str = "float32", device: str = "cpu"
) -> Iterator[str]:
    """Load a model, run both forms on one prompt, and yield the lines of a report.

    ``model`` is a folder, a hub name, or ``embedded``; without an ``image`` the prompt has noise of
    448 × 448 pixels. ``UserError``: the model cannot be loaded.
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
    loaded.model.to(device)
    distribution = build_sampling_distribution(
        loaded.model, loaded.prompts.processor, loaded.prompts.family, settings.rollout
    )
    policy = Policy(loaded, distribution)
    config = loaded.model.config
    weights = sum(weight.numel() for weight in loaded.model.parameters())
    yield f"model        {model}: {config.model_type}, {weights:,} weights, {dtype}"
    name = type(policy.family).__name__
    name = "none of the known ones" if name == "Family" else name
    yield f"family       {name}, coordinate frame {policy.prompts.frame.name!r}"
    if image is None:
        noise = np.random.default_rng(0).integers(0, 256, (448, 448, 3), dtype=np.uint8)
        image = MediaReader(None, PILLOW_WARNS_AT).read(encode_png(Image.fromarray(noise)), "noise")
    example = policy.prompts.with_resized_sizes(Example("doctor", (image,), QUESTION, ""))
    prompt = policy.prompts.build(example, PlainQuestion())
    (width, height), resized = image.size, ""
    if policy.budget is not None:  # else the processor decides
        low, high = policy.budget.min_pixels, policy.budget.max_pixels
        yield f"pixel budget {low:,} to {high:,} pixels per image"
        resized = ", resized to {} × {}".format(*example.images[0].resized_size)
    yield (
        f"image        {width} × {height} pixels{resized}; {len(prompt.token_ids)} prompt tokens, "
        f"{sum(token in distribution.banned for token in prompt.token_ids)} of them for the image"
    )
    reason = policy.family.why_not_shared(config)
    if reason is None and (problem := policy.try_form(prompt).shared) is not None:
        reason = f"with a shared prompt, {problem}"
    if reason is not None:
        yield f"form         one prompt pass per completion: {reason}"
        return
    yield from _compare_forms(policy, policy.view(repeated=True), prompt)


def _compare_forms(shared: Policy, repeated: Policy, prompt: Prompt) -> Iterator[str]:
    """Yield how far the results of two policies over one model differ, and their speed."""
    rollout, group = _time_second(lambda: _sample(shared, prompt))
    plain_rollout, _ = _time_second(lambda: _sample(repeated, prompt))
    # Both forms score the same completions, of different lengths as in a real group.
    tokens = tuple(c.token_ids[: len(c.token_ids) - i] for i, c in enumerate(group))
    batch = MicroBatch((GroupSlice(prompt, tokens, tuple(range(len(group)))),))
    update, logprobs, gradient = _time_update(shared, batch)
    plain_update, plain_logprobs, plain = _time_update(repeated, batch)
    largest = float((logprobs - plain_logprobs).abs().max())
    yield f"log-probs    largest difference of the two forms: {largest:.1e} nats"
    norms = [
        sum(float(g.double().square().sum()) for g in gradients.values())
        for gradients in ({n: gradient[n] - g for n, g in plain.items()}, plain)
    ]
    yield f"gradient     relative difference {(norms[0] / norms[1]) ** 0.5:.1e}"
    for name, a, b in (("rollout", rollout, plain_rollout), ("update", update, plain_update)):
        yield f"{name:<12} {a:.2f} s shared, {b:.2f} s repeated ({b / a:.1f} times)"
    yield f"attention    {shared.describe_engine()}"
    yield f"form         one prompt pass per group of {GROUP_SIZE} (policy.engine=auto)"


def _time_second(run: Callable[[], Any]) -> tuple[float, Any]:
    run()
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _sample(policy: Policy, prompt: Prompt) -> Any:
    policy.engine.clear_image_features()
    sampling = SamplingSettings(policy.distribution, COMPLETION_LENGTH)
    (group,) = policy.sample([prompt], sampling, GROUP_SIZE, [(0,)], 1 << 30)
    return group


def _time_update(policy: Policy, batch: MicroBatch) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return the seconds of a backward pass, the log-probs and the gradient of their sum."""

    def update() -> Tensor:
        policy.model.zero_grad()
        policy.engine.clear_image_features()
        logprobs = policy.score(batch).logprobs
        logprobs.sum().backward()
        return logprobs.detach()

    seconds, logprobs = _time_second(update)
    gradient = {n: w.grad.cpu() for n, w in policy.trainable_parameters() if w.grad is not None}
    policy.model.zero_grad()
    return seconds, logprobs, gradient
