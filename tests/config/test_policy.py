"""The policy's settings: values and combinations that are refused, with their remedies."""

from __future__ import annotations

import math

import pytest

from vlm_grpo.config.methods import NoiseSettings
from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.config.rollout import RolloutSettings


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
