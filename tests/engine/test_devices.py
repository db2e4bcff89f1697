"""Scoring runs on the model's device without reading from it.

The meta device computes shapes only: reading a value and mixing it with tensors on the CPU are
errors there, as is everything whose shape depends on values.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, add_lora, make_prompt, noise_example, pack_groups, tiny_policy
from torch import Tensor

from vlm_grpo.engine import varlen
from vlm_grpo.engine.attention import use_shared_attention
from vlm_grpo.engine.logprobs import TokenScores
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Completion

DEVICE = torch.device("meta")


def build_policy(family: str, lora: bool) -> Policy:
    """Build a policy whose model is on the device, in bfloat16."""
    host = tiny_policy(family)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            model = type(host.model)(host.model.config)
            use_shared_attention(host.family, model)
            loaded = LoadedModel(model, host.processor, host.family, host.budget, True, None)
            policy = Policy(loaded, host.distribution, chunk_tokens=7)
            if lora:
                add_lora(policy, ["q_proj", "down_proj"])
    finally:
        torch.set_default_dtype(torch.float32)
    return policy


def score(policy: Policy) -> TokenScores:
    """Score completions of one to three tokens of prompts with two images, one and none."""
    sizes = [[(56, 56), (84, 28)], [(28, 56)], []]
    prompts = [make_prompt(policy, noise_example(str(len(s)), s)) for s in sizes]
    groups = []
    for _ in prompts:
        tokens = ((1, 2, 3), (4, 5), (6,))
        groups.append(tuple(Completion(t, (0.0,) * len(t), "", "eos", ()) for t in tokens))
    return policy.score(pack_groups(prompts, groups))


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "has_varlen", lambda query: True)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_and_its_gradient_read_nothing_from_the_device(family: str, lora: bool) -> None:
    policy = build_policy(family, lora)
    score(policy).logprobs.sum().backward()
    trained = policy.trainable_parameters()
    assert all(w.grad is not None and w.grad.device == DEVICE for _, w in trained)


@pytest.mark.parametrize("attend", ["VarlenPlan.attend", "attend_in_segments"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda query: query.sum().item(),
        lambda query: query + torch.zeros_like(query, device="cpu"),
        lambda query: query[query > 0],
    ],
)
def test_reads_and_other_devices_are_found(
    wrong: Any, attend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build_policy("qwen2_5_vl", lora=False)
    original = operator.attrgetter(attend)(varlen)

    def attend_and_err(*arguments: Any) -> Tensor:
        wrong(next(tensor for tensor in arguments if isinstance(tensor, Tensor)))
        return original(*arguments)

    monkeypatch.setattr(f"{varlen.__name__}.{attend}", attend_and_err)
    with pytest.raises((RuntimeError, NotImplementedError)):
        score(policy)
