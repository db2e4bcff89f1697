"""Check a model: compare the shared prompt pass with the repeated one."""

from collections.abc import Iterator

import numpy as np
from PIL import Image
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.data import PILLOW_WARNS_AT
from vlm_grpo.config.run import Settings
from vlm_grpo.data.images import MediaReader
from vlm_grpo.media.images import encode_png
from vlm_grpo.model.policy import load_policy
from vlm_grpo.model.sharing_check import ROLLOUT_LENGTH, why_not_shared
from vlm_grpo.task import PlainQuestion
from vlm_grpo.types import Example, ImageRef

QUESTION = "What is in the image? Describe every object in a few words."
GROUP_SIZE = 4


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
            "rollout": {"num_generations": GROUP_SIZE, "min_new_tokens": ROLLOUT_LENGTH},
        }
    )
    policy = load_policy(settings, training=False)
    policy.sharing_check = None  # which would replace a form that differs
    policy.model.to(device)
    config = policy.model.config
    weights = sum(weight.numel() for weight in policy.model.parameters())
    yield f"model        {model}: {config.model_type}, {weights:,} weights, {dtype}"
    name = type(policy.family).__name__
    name = "none of the known ones" if name == "Family" else name
    yield f"family       {name}, coordinate frame {policy.prompts.frame.name!r}"
    if image is None:
        noise = np.random.default_rng(0).integers(0, 256, (448, 448, 3), dtype=np.uint8)
        image = MediaReader(None, PILLOW_WARNS_AT).read(encode_png(Image.fromarray(noise)), "noise")
    example = policy.prompts.with_resized_sizes(Example("doctor", (image,), QUESTION, ""))
    prompt = policy.prompts.build(example, PlainQuestion())
    try:
        yield f"tools        results are given in the role {policy.prompts.find_result_role()!r}"
    except ValueError as error:
        yield f"tools        none: {error}"
    (width, height), resized = image.size, ""
    if policy.budget is not None:  # else the processor decides
        low, high = policy.budget.min_pixels, policy.budget.max_pixels
        yield f"pixel budget {low:,} to {high:,} pixels per image"
        resized = ", resized to {} × {}".format(*example.images[0].resized_size)
    tokens, banned = prompt.token_ids, policy.distribution.banned
    yield (
        f"image        {width} × {height} pixels{resized}; {len(tokens)} prompt tokens, "
        f"{sum(token in banned for token in tokens)} of them for the image"
    )
    reason = why_not_shared(policy.family, config)
    if reason is None and (problem := policy.try_sharing(prompt)) is not None:
        reason = f"with a shared prompt, {problem}"
    if reason is not None:
        yield f"form         one prompt pass per completion: {reason}"
        return
    yield f"attention    {policy.describe_engine()}"
    yield f"form         one prompt pass per group of {GROUP_SIZE} (policy.engine=auto)"
