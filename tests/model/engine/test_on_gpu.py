"""Values in bfloat16, on a GPU with its own kernels, are close to those in float32 on the CPU.

The tests run on the CPU, too, without those kernels, so that they are known to work.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from gradients import relative_distance, relative_error
from tiny_models import (
    FAMILIES,
    add_lora,
    make_prompt,
    noise_example,
    pack_groups,
    sample_groups,
    sampled_logprobs,
    tiny_policy,
)
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from vlm_grpo.model.engine.activations import offload_activations
from vlm_grpo.model.engine.forwards import use_fused_norms
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Completion, Prompt

on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
of_each_family = pytest.mark.parametrize("family", FAMILIES)
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


def build_prompts(policy: Policy) -> list[Prompt]:
    sizes = [[(112, 84), (84, 28)], [(28, 56)], []]
    return [make_prompt(policy, noise_example(str(len(s)), s)) for s in sizes]


def compute(
    policy: Policy, prompts: list[Prompt], around: Any = contextlib.nullcontext
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs of completions, scored in a context, and the gradient of their sum."""
    group = tuple(Completion(t, (0.0,) * len(t), "", "eos", ()) for t in TOKENS)
    with around():
        logprobs = policy.score(pack_groups(prompts, [group] * len(prompts))).logprobs
    logprobs.sum().backward()
    trained = policy.trainable_parameters()
    grads = {name: w.grad.cpu().double() for name, w in trained if w.grad is not None}
    return logprobs.detach().cpu(), grads


@on_both
@of_each_family
def test_features_samples_scores_and_gradients(family: str, device: str) -> None:
    """The bounds are about twice the errors of bfloat16 on a CPU, in nats."""
    pair = policy, exact = build_pair(family, device)
    prompts = build_prompts(exact)
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


@on_both
@of_each_family
def test_gradients_with_offloaded_activations(family: str, device: str) -> None:
    grads = []
    for offloads in (False, True):
        policy = tiny_policy(family)
        add_lora(policy, ["q_proj", "down_proj"])
        policy.model.to(device)
        offload = functools.partial(offload_activations, policy.model, torch.device(device), 1)
        around = offload if offloads else contextlib.nullcontext
        grads.append(compute(policy, build_prompts(policy), around)[1])
    assert relative_distance(*grads) < 1e-5  # sums on a GPU have no fixed order


@on_both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms(dtype: torch.dtype, device: str) -> None:
    norm = LlamaRMSNorm(64, eps=1e-3).to(dtype)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    hidden = torch.randn(7, 64).to(dtype)
    wide, weight = (x.detach().double().requires_grad_() for x in (hidden, norm.weight))
    exact = weight * wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    (exact * torch.arange(64)).sum().backward()
    use_fused_norms(norm)
    norm.to(device)
    x = hidden.to(device).requires_grad_()
    found = norm(x)
    (found * torch.arange(64, device=device)).sum().backward()
    bound = 1e-5 if dtype == torch.float32 else 0.02  # bfloat16 has 8 bits
    pairs = [(found, exact), (x.grad, wide.grad), (norm.weight.grad, weight.grad)]
    for one, other in pairs:
        assert (one.detach().cpu().double() - other.detach()).norm() < bound * other.norm()
