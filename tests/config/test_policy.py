"""The policy's settings: values and combinations that are refused, with their remedies."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from vlm_grpo.config.policy import LoraSettings, PolicySettings, RolloutSettings


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
