"""Micro-batches that share an image share its pass through a trained vision tower."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gradients import relative_distance
from tiny_models import FAMILIES, make_prompt, noise_example, tiny_policy

from vlm_grpo.engine.batch import GroupSlice, pack
from vlm_grpo.model.policy import Policy


def make_slices(policy: Policy) -> list[GroupSlice]:
    """Build two prompts about one image and one about another, three completions each."""
    first = noise_example("a", [(60, 90)], "What is this?", seed=1)
    examples = [
        first,
        replace(first, id="b", question="How many are there?"),
        noise_example("c", [(56, 56)], seed=2),
    ]
    slices = []
    for index, example in enumerate(examples):
        completions = (tuple(range(9 + index, 20 + index)),) * 3
        rows = tuple(range(3 * index, 3 * index + 3))
        slices.append(GroupSlice(make_prompt(policy, example), completions, rows))
    return slices


def compute_gradient(policy: Policy, max_tokens: int, share: bool) -> tuple[dict, int, int]:
    """Return the gradient of the summed log-probs, and the numbers of micro-batches and passes."""
    policy.model.zero_grad()
    policy.counters.encoder_passes = 0
    batches = pack(make_slices(policy), max_tokens)
    if share:
        with policy.share_image_passes() as finish:
            for count, micro in enumerate(batches, 1):
                policy.score(micro).logprobs.sum().backward()
                finish({image for later in batches[count:] for image in later.images})
    else:
        for micro in batches:
            policy.score(micro).logprobs.sum().backward()
    grads = {n: w.grad.clone() for n, w in policy.trainable_parameters() if w.grad is not None}
    return grads, len(batches), policy.counters.encoder_passes


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_encoder_passes_does_not_change_the_gradient(family: str) -> None:
    policy = tiny_policy(family, dtype=torch.float64)
    expected, one, _ = compute_gradient(policy, 10_000, share=False)
    found, several, passes = compute_gradient(policy, 60, share=True)
    _, _, without = compute_gradient(policy, 60, share=False)
    assert one == 1
    assert several >= 6  # groups of three are split, too
    assert passes == 2 < without  # two images
    assert any(name.startswith("model.visual") for name in found)
    # float64, but transformers computes norms in float32: 1e-7 of rounding per layer.
    assert relative_distance(found, expected) < 1e-6
