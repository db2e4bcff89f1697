"""Tests of the model shape against the model's weights."""

from __future__ import annotations

import pytest
from tiny_models import FAMILIES
from tiny_policies import POLICIES, build_policy

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
    assert shape.trains_vision == policy.trains_vision


def test_tied_weights_are_counted_once() -> None:
    settings = load_settings("counting")
    model = load_model(settings).model
    shape, _ = read_model_shape(model.config, settings.policy)
    assert model.config.tie_word_embeddings
    counted = sum(weight.numel() for weight in model.parameters())
    assert shape.num_weights == shape.num_trained == counted
