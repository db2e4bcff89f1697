"""A trained vision tower is passed once for all micro-batches that share an image."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, Plain, distance, noise_example, tiny_policy

from vlm_grpo.engine.batch import GroupSlice, pack
from vlm_grpo.model.policy import Policy


def slices(policy: Policy) -> list[GroupSlice]:
    """Two prompts about one image and one about another, three completions each."""
    examples = [
        noise_example("a", [(60, 90)], "What is this?", seed=1),
        noise_example("b", [(60, 90)], "How many are there?", seed=1),
        noise_example("c", [(56, 56)], seed=2),
    ]
    examples[1] = type(examples[1])("b", examples[0].images, examples[1].question, "")
    found = []
    for index, example in enumerate(examples):
        prompt = policy.build_prompt(policy.with_resized_sizes(example), Plain())
        completions = tuple(tuple(range(9 + index, 20 + index)) for _ in range(3))
        found.append(GroupSlice(prompt, completions, tuple(range(3 * index, 3 * index + 3))))
    return found


def gradient(policy: Policy, max_tokens: int, once: bool) -> tuple[dict, int, int]:
    """The gradient of the mean log-prob, with the numbers of micro-batches and encoder passes."""
    policy.model.zero_grad()
    policy.counters.encoder_passes = 0
    batches = pack(slices(policy), max_tokens)
    if once:
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
def test_micro_batches_share_an_encoder_pass_and_give_the_same_gradient(family: str) -> None:
    policy = tiny_policy(family, dtype=torch.float64)
    whole, one, _ = gradient(policy, 10_000, once=False)
    cut, several, passes = gradient(policy, 60, once=True)
    _, _, without = gradient(policy, 60, once=False)
    assert one == 1
    assert several >= 6  # groups of three are cut, too
    assert passes == 2 < without  # two images
    assert any(name.startswith("model.visual") for name in cut)
    # float64, but transformers takes norms in float32: 1e-7 of rounding in every layer.
    assert distance(cut, whole) < 1e-6
