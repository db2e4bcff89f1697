"""The policy's settings: values and combinations that are refused, with their remedies."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from vlm_grpo.config.policy import (
    LoraSettings,
    NoiseSettings,
    PolicySettings,
    RolloutSettings,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": {"dropout": 0.1}}, "must be 0: each pass draws a new dropout mask"),
        ({"lora": {"target": []}}, "names no module: use language, all"),
        ({"lora": {}, "freeze": ["vision"]}, "no effect with policy.lora.*policy.lora.target"),
        ({"freeze": ["vision", "projector", "language"]}, "nothing is left to train"),
        ({"min_pixels": 9, "max_pixels": 4}, "min_pixels=9 exceeds max_pixels=4"),
    ],
)
def test_an_invalid_policy_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PolicySettings.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 1}, "greater than or equal to 2"),
        ({"max_resample": 3}, "without rollout.dynamic_sampling=true"),
        ({"min_new_tokens": 9, "max_completion_length": 8}, "min_new_tokens=9 exceeds"),
        ({"stop": [""]}, "has an empty string"),
        ({"noise": {"strength": 1000}}, "less than or equal to 999"),
        ({"noise": {"share": 1.0}}, "less than 1"),
    ],
)
def test_an_invalid_rollout_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutSettings.model_validate(fields)


def test_valid_settings_survive_a_round_trip() -> None:
    policy = PolicySettings(lora=LoraSettings(target=("q_proj",)), max_pixels=9)
    rollout = RolloutSettings(dynamic_sampling=True, max_resample=2, stop=("\n",))
    assert PolicySettings.model_validate(policy.model_dump()) == policy
    assert RolloutSettings.model_validate(rollout.model_dump()) == rollout


@pytest.mark.parametrize(
    ("strength", "midpoint", "steepness", "total"),
    [(500, 40, 30.0, 60), (450, 40, 60.0, 120), (999, 3, 2.0, 7)],
)
def test_the_noise_falls_as_in_the_authors_schedule(
    strength: int, midpoint: int, steepness: float, total: int
) -> None:
    """The first two are their runs on Geometry3K and MMK12, whose midpoints are steps."""
    noise = NoiseSettings(strength=strength, midpoint=midpoint / total, steepness=steepness)
    for step in range(1, total + 1):
        exponent = steepness * (step / total - midpoint / total)
        exact = strength * (1 - 1 / (1 + math.exp(-exponent)))
        assert noise.anneal(step / total) in {int(exact - 1e-9), int(exact + 1e-9)}
    assert NoiseSettings(steepness=1e6).anneal(0.0) == 500  # no overflow
    assert NoiseSettings(steepness=1e6).anneal(1.0) == 0


@pytest.mark.parametrize(
    ("share", "size", "count"),
    [(0.5, 12, 6), (0.5, 5, 3), (0.25, 8, 2), (0.3, 8, 2), (0.01, 8, 1), (0.99, 8, 7)],
)
def test_a_share_is_rounded_to_whole_completions(share: float, size: int, count: int) -> None:
    assert NoiseSettings(share=share).count(size) == count
