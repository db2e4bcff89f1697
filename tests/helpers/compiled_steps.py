"""Compile the decode steps of small models as a whole, and compare what they sample.

    python tests/helpers/compiled_steps.py

The checks of shapes that pytest installs cannot be compiled, so the tests run this as a program.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import meta_device
import numpy as np
import pytest
import torch
from family_policies import build_family_policy
from meta_device import build_policy, sample, use_gpu_kernels
from tiny_models import make_prompt, noise_example, sample_groups
from torch import Tensor, nn
from torch._dynamo.utils import counters

from vlm_grpo.model.engine import shared
from vlm_grpo.model.engine.graphs import DecodeStep, compile_step
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Completion

FAMILIES = ("qwen3_vl", "gemma3", "qwen3_5")
GPU = "qwen2_5_vl on a GPU, with LoRA"
NAMES = (*FAMILIES, GPU)


def compile_whole(step: DecodeStep, inputs: tuple[Tensor, ...]) -> DecodeStep:
    """Trace a step without generating kernels; a graph break is an error."""
    return compile_step(step, backend="eager", fullgraph=True)


def keep_layers(policy: Policy) -> None:
    """Keep one layer of each type: another one of the same type compiles like it."""
    language_model: Any = policy.family.language_model(policy.model)
    config, layers = language_model.config, language_model.layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    kept = sorted({kinds.index(kind) for kind in kinds})
    language_model.layers = nn.ModuleList(layers[index] for index in kept)
    config.layer_types, config.num_hidden_layers = [kinds[index] for index in kept], len(kept)
    for number, layer in enumerate(language_model.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                vars(module)["layer_idx"] = number


def compare(family: str) -> None:
    """Compare what eager and compiled steps sample; one rollout compiles at most three graphs."""
    policy = build_family_policy(family, torch.float64, shared=True)
    keep_layers(policy)
    prompts = [make_prompt(policy, noise_example(str(n), [], "What? " * n)) for n in (1, 5)]

    def draw() -> list[Completion]:
        groups = sample_groups(policy, prompts, group_size=3, length=9)
        return [completion for group in groups for completion in group]

    eager = draw()
    torch._dynamo.reset()  # noqa: SLF001
    counters.clear()
    policy.engine.use_capture(compile_whole)
    for found, expected in zip(draw(), eager, strict=True):
        assert found.token_ids == expected.token_ids
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-9)
    assert 1 <= counters["stats"]["unique_graphs"] <= 3, counters["stats"]
    assert policy.describe_engine().endswith("as CUDA graphs")  # no step failed to compile


def main() -> None:
    torch.set_num_threads(1)
    shared.LENGTH_BUCKET = 4  # several captures per rollout
    for family in FAMILIES:
        compare(family)
        print(family, flush=True)
    with pytest.MonkeyPatch.context() as patch:
        use_gpu_kernels(patch)
        # A step is not compiled while its operations are checked one by one.
        patch.setattr(meta_device, "no_host_tensors", contextlib.nullcontext)
        policy = build_policy("qwen2_5_vl", lora=True)
        keep_layers(policy)
        policy.engine.use_capture(compile_whole)
        assert sample(policy, patch) > 0
        assert policy.describe_engine().endswith("as CUDA graphs")  # no step failed to compile
    print(GPU)  # the meta device has no values to compare


if __name__ == "__main__":
    sys.exit(main())
