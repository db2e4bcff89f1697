"""Tests of the model shape against the model's weights."""

from __future__ import annotations

from typing import Any

import pytest
from family_models import BUILDERS
from tiny_models import FAMILIES
from tiny_policies import POLICIES, build_policy

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model.loading import load_model
from vlm_grpo.planning.model_shape import read_model_shape


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", POLICIES)
def test_weights_are_counted_exactly(family: str, name: str) -> None:
    policy, policy_settings = build_policy(family, POLICIES[name])
    shape, _ = read_model_shape(policy.model.config, policy_settings)
    assert shape.num_trained == sum(weight.numel() for _, weight in policy.trainable_parameters())
    everything = sum(weight.numel() for weight in policy.model.parameters())
    assert shape.num_weights + (shape.num_trained if shape.lora_rank else 0) == everything
    engine: Any = policy.engine
    assert shape.trains_vision == engine.encoder.is_trained


def test_tied_weights_are_counted_once() -> None:
    settings = load_settings("counting")
    model = load_model(settings).model
    shape, _ = read_model_shape(model.config, settings.policy)
    assert model.config.tie_word_embeddings
    counted = sum(weight.numel() for weight in model.parameters())
    assert shape.num_weights == shape.num_trained == counted


@pytest.mark.parametrize(
    ("family", "fuses"),
    [
        ("internvl", True),
        ("gemma4", True),
        ("gemma3", False),  # multiplies by 1 + w
        ("qwen3_5", False),  # also
        ("cohere2_vision", False),  # has layer norms
    ],
)
def test_norms_are_fused_where_the_kernel_has_their_formula(family: str, fuses: bool) -> None:
    model, _ = BUILDERS[family]()
    shape, _ = read_model_shape(model.config, PolicySettings())
    assert shape.text.fuses_norms == fuses
