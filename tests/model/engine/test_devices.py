"""Scoring and decoding run on the model's device without reading from it; values in bfloat16, on a
GPU with its own kernels, are close to those in float32 on the CPU."""

import numpy as np
import pytest
import torch
from family_policies import read_gradient
from gpu_standins import record_copies
from gradients import relative_distance, relative_error
from meta_device import DEVICE, SIZES, build_policy, no_host_tensors, sample, use_gpu_kernels
from tiny_models import (
    FAMILIES,
    image_prompts,
    pack_groups,
    pack_tokens,
    sample_groups,
    sampled_logprobs,
    tiny_policy,
)
from torch import Tensor

from vlm_grpo.model import transfer
from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.shared import CHECK_EVERY
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import Prompt

TOKENS = ((70, 71, 72, 73), (74, 75), (76,))
WRONG = (
    lambda x: x.sum().item(),
    lambda x: x + torch.zeros_like(x, device="cpu"),
    # Allowed on the meta device, but CUDA waits for the copy.
    lambda x: x[torch.zeros(1, dtype=torch.int64)],
    lambda x: x[[0]],
    lambda x: torch.zeros(1).to(x.device),
    lambda x: torch.tensor([0], device=x.device),
    lambda x: x[x > 0],
)


def test_copies_to_a_gpu_are_pinned_and_do_not_wait(monkeypatch):
    calls = record_copies(monkeypatch)
    monkeypatch.setattr(Tensor, "to", lambda x, *args, **kwargs: [x, calls.append(kwargs)][0])
    copy_to(torch.device("cuda"), np.zeros(3))
    copy_to(DEVICE, torch.zeros(3))
    assert calls == ["pin", {"non_blocking": True}, {"non_blocking": True}]


def test_a_snapshot_of_a_gpu_is_pinned_and_waits_once(monkeypatch):
    calls = record_copies(monkeypatch)
    tensors = [torch.arange(3.0), torch.tensor(7), torch.arange(40).view(5, 8).bfloat16()]
    tensors += [torch.zeros(0), torch.ones(2, 2, dtype=torch.float64)[:, :1].requires_grad_()]
    calls.clear()
    copies = transfer.snapshot_on_host(tensors)
    assert calls == [*["pin", "copy_ without waiting"] * 5, "wait"]
    for one, other in zip(copies, tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert not one.requires_grad
        assert one.is_contiguous()


@pytest.fixture
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu_kernels(monkeypatch)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_and_its_gradient_read_nothing_from_the_device(family, lora):
    policy = build_policy(family, lora)
    batch = pack_tokens(image_prompts(policy, SIZES), [TOKENS] * 3)
    with no_host_tensors():
        policy.score(batch).logprobs.sum().backward()
    trained = policy.trainable_parameters()
    assert all(w.grad is not None and w.grad.device == DEVICE for _, w in trained)


# The adapters of all families are the same layers.
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(
    ("family", "lora", "parts", "truncation"),
    [
        (FAMILIES[1], True, 1, {}),
        (FAMILIES[2], False, 3, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}),
    ],
)
def test_a_rollout_reads_only_which_completions_ended(family, lora, parts, truncation, monkeypatch):
    monkeypatch.setattr(kernels, "count_parts", lambda *_: parts)
    steps = sample(build_policy(family, lora), monkeypatch, **truncation)
    assert steps == 4 * CHECK_EVERY  # one read after the first tokens, then one for eight


@pytest.mark.parametrize("wrong", WRONG)
def test_reads_and_other_devices_are_found(wrong):
    with no_host_tensors(), pytest.raises((RuntimeError, NotImplementedError)):
        wrong(torch.ones(3, device=DEVICE))


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
    logprobs = policy.score(pack_tokens(prompts, [TOKENS] * 3)).logprobs
    logprobs.sum().backward()
    grads = {name: grad.cpu() for name, grad in read_gradient(policy).items()}
    return logprobs.detach().cpu(), grads


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_samples_scores_and_gradients(family, device):
    """The bounds are about twice the errors of bfloat16 on a CPU, in nats."""
    pair = policy, exact = build_pair(family, device)
    prompts = image_prompts(exact, [[(112, 84), (84, 28)], [(28, 56)], []])
    images = [policy.family.split_images(prompt) for prompt in prompts]
    with torch.no_grad():
        features = [[f for x in images for f in p.family.encode_images(p.model, x)] for p in pair]
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
