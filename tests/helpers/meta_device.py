"""A policy on the meta device, which stands in for a GPU with its kernels.

The meta device computes shapes only: reading a value and mixing it with tensors on the CPU are
errors there, as is everything whose shape depends on values.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import add_lora, make_prompt, noise_example, tiny_policy

from vlm_grpo.engine import norms, varlen
from vlm_grpo.engine.attention import use_shared_attention
from vlm_grpo.engine.decode import SharedDecoder
from vlm_grpo.engine.sampling import SamplerState, SamplingSettings
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


def use_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine take the way of a GPU."""
    monkeypatch.setattr(varlen, "has_varlen", lambda query: True)
    monkeypatch.setattr(norms, "has_kernel", lambda hidden, weight: True)
    # Autocast does not know the meta device.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)


def sample(policy: Policy, monkeypatch: pytest.MonkeyPatch, **truncation: float) -> int:
    """Sample completions of different lengths and return the number of decode steps."""
    all_active, some_active = np.ones(6, dtype=bool), np.array([1, 0, 0, 1, 1, 1], dtype=bool)
    reads = iter([all_active, all_active, some_active, some_active, ~all_active])
    monkeypatch.setattr(SamplerState, "update_active", lambda state: next(reads))
    done = Completion((1,), (0.0,), "", "eos")
    monkeypatch.setattr(Policy, "_build_completions", lambda policy, state: [done] * state.count)
    steps, step = [], SharedDecoder.step
    monkeypatch.setattr(SharedDecoder, "step", lambda *args: [step(*args), steps.append(1)][0])
    sizes = [[(56, 56), (84, 28)], [(28, 56)], []]
    prompts = [make_prompt(policy, noise_example(str(len(s)), s)) for s in sizes]
    settings = SamplingSettings(
        dataclasses.replace(policy.distribution, min_new_tokens=2),
        40,
        with_entropies=True,
        **truncation,  # type: ignore[arg-type]
    )
    policy.sample(prompts, settings, 2, [(0, index) for index in range(3)])
    return len(steps)
