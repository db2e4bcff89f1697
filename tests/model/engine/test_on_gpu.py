"""Values in bfloat16, on a GPU with its own kernels, are close to those in float32 on the CPU.

The test runs on the CPU, too, without those kernels, so that it is known to work.
"""

from __future__ import annotations

import pytest
import torch
from gradients import relative_distance, relative_error
from tiny_models import (
    FAMILIES,
    make_prompt,
    noise_example,
    pack_groups,
    sample_groups,
    sampled_logprobs,
    tiny_policy,
)
from torch import Tensor

from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Completion, Prompt

TOKENS = ((70, 71, 72, 73), (74, 75), (76,))


def build_pair(family: str, device: str) -> tuple[Policy, Policy]:
    """Return a policy in bfloat16 on the device, and one of equal weights in float32 on the CPU."""
    policy, exact = tiny_policy(family, dtype=torch.bfloat16), tiny_policy(family)
    for part in ("parameters", "buffers"):
        pairs = zip(getattr(exact.model, part)(), getattr(policy.model, part)(), strict=True)
        for wide, narrow in pairs:
            wide.data.copy_(narrow)
    policy.model.to(device)
    return policy, exact


def compute(policy: Policy, prompts: list[Prompt]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs of completions, and the gradient of their sum."""
    group = tuple(Completion(t, (0.0,) * len(t), "", "eos", ()) for t in TOKENS)
    logprobs = policy.score(pack_groups(prompts, [group] * len(prompts))).logprobs
    logprobs.sum().backward()
    trained = policy.trainable_parameters()
    grads = {name: w.grad.cpu().double() for name, w in trained if w.grad is not None}
    return logprobs.detach().cpu(), grads


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_samples_scores_and_gradients(family: str, device: str) -> None:
    """The bounds are about twice the errors of bfloat16 on a CPU, in nats."""
    pair = policy, exact = build_pair(family, device)
    sizes = [[(112, 84), (84, 28)], [(28, 56)], []]
    prompts = [make_prompt(exact, noise_example(str(len(s)), s)) for s in sizes]
    with torch.no_grad():
        features = [
            [f for x in prompts for f in p.family.encode_images(p.model, p.family.split_images(x))]
            for p in pair
        ]
    assert len(features[0]) == 3
    for found, expected in zip(*features, strict=True):
        pairs = [(found.embeds, expected.embeds)]
        pairs += zip(found.deepstack, expected.deepstack, strict=True)
        assert all(relative_error(one.cpu(), other) < 0.05 for one, other in pairs)
    groups = sample_groups(policy, prompts)
    batch, sampled = pack_groups(prompts, groups), sampled_logprobs(groups)
    with torch.no_grad():
        scored, expected = (p.score(batch).logprobs.cpu() for p in pair)
    assert (sampled - scored).abs().max() < 0.2
    assert (sampled - expected).abs().max() < 0.4
    (found, grads), (expected, exact_grads) = (compute(p, prompts) for p in pair)
    assert (found - expected).abs().max() < 0.2
    assert relative_distance(grads, exact_grads) < 0.12
