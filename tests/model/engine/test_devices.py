"""Scoring and decoding run on the model's device without reading from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from meta_device import DEVICE, build_policy, no_host_tensors, sample, use_gpu_kernels
from recorded_copies import record_copies
from tiny_models import FAMILIES, make_prompt, noise_example, pack_groups
from torch import Tensor

from vlm_grpo.model import transfer
from vlm_grpo.model.engine.shared import CHECK_EVERY
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import Completion

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


def compute_gradient(policy: Policy) -> None:
    """Compute the gradient of the log-probs of completions of one to three tokens of prompts with
    two images, one and none."""
    sizes = [[(56, 56), (84, 28)], [(28, 56)], []]
    prompts = [make_prompt(policy, noise_example(str(len(s)), s)) for s in sizes]
    groups: list[tuple[Completion, ...]] = []
    for _ in sizes:
        tokens = ((1, 2, 3), (4, 5), (6,))
        groups.append(tuple(Completion(t, (0.0,) * len(t), "", "eos", ()) for t in tokens))
    with no_host_tensors():
        policy.score(pack_groups(prompts, groups)).logprobs.sum().backward()


def test_copies_to_a_gpu_are_pinned_and_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_copies(monkeypatch)
    monkeypatch.setattr(Tensor, "to", lambda x, *args, **kwargs: [x, calls.append(kwargs)][0])
    copy_to(torch.device("cuda"), np.zeros(3))
    copy_to(DEVICE, torch.zeros(3))
    assert calls == ["pin", {"non_blocking": True}, {"non_blocking": True}]


def test_a_snapshot_of_a_gpu_shares_pinned_blocks_and_waits_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = record_copies(monkeypatch)
    monkeypatch.setattr(transfer, "PINNED_BLOCK", 128)
    tensors = [torch.arange(3.0), torch.tensor(7), torch.arange(40).view(5, 8).bfloat16()]
    tensors += [torch.zeros(0), torch.ones(2, 2, dtype=torch.float64)[:, :1].requires_grad_()]
    calls.clear()
    copies = transfer.snapshot_on_host(tensors)
    # 64 + 64 bytes in a block, 80 in one that is padded to 128, and the last 64 in its own.
    copy = "copy_ without waiting"
    assert calls == ["pin", copy, copy, "pin", copy, copy, "pin", copy, "wait"]
    for one, other in zip(copies, tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert not one.requires_grad
        assert one.is_contiguous()


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu_kernels(monkeypatch)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_and_its_gradient_read_nothing_from_the_device(family: str, lora: bool) -> None:
    policy = build_policy(family, lora)
    compute_gradient(policy)
    trained = policy.trainable_parameters()
    assert all(w.grad is not None and w.grad.device == DEVICE for _, w in trained)


# The adapters of all families are the same layers.
@pytest.mark.parametrize(
    ("family", "lora"), [*((family, False) for family in FAMILIES), (FAMILIES[0], True)]
)
def test_a_rollout_reads_only_which_completions_are_finished(
    family: str, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = sample(build_policy(family, lora), monkeypatch)
    assert steps == 4 * CHECK_EVERY  # one read after the first tokens, then one for eight


def test_truncated_sampling_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build_policy("qwen2_5_vl", lora=False)
    assert sample(policy, monkeypatch, top_k=5, top_p=0.9, min_p=0.1)


@pytest.mark.parametrize("wrong", WRONG)
def test_reads_and_other_devices_are_found(wrong: Any) -> None:
    with no_host_tensors(), pytest.raises((RuntimeError, NotImplementedError)):
        wrong(torch.ones(3, device=DEVICE))
