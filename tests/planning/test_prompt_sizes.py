"""Tests of the prompt sizes against the policy's prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import noise_example

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.sampling import build_sampling_distribution
from vlm_grpo.model.loading import load_model
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning.planner import Planner, plan


def test_sizes_match_the_policys_prompts(planner: Planner) -> None:
    loaded, rollout = load_model(planner.settings), planner.settings.rollout
    policy = Policy(
        loaded, build_sampling_distribution(loaded.model, loaded.processor, loaded.family, rollout)
    )
    sizes = planner.estimate_step(planner.settings).prompts
    prompts = [
        policy.prompts.build(policy.prompts.with_resized_sizes(example), planner.task)
        for example in planner.prompts.examples
    ]
    assert [size.tokens for size in sizes] == sorted(len(prompt.token_ids) for prompt in prompts)
    values = [prompt.vision["pixel_values"].numel() for prompt in prompts]
    assert sorted(size.values for size in sizes) == sorted(values)


def test_an_image_that_cannot_be_resized_is_an_error(tmp_path: Path) -> None:
    noise_example("thin", [(900, 3)]).images[0].load().save(tmp_path / "thin.png")
    row = {"id": "t1", "images": ["thin.png"], "question": "How many?", "answer": 1}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    settings = load_settings("counting", [f"data.train={tmp_path / 'data.jsonl'}"])
    with pytest.raises(UserError, match="t1: absolute aspect ratio"):
        plan(settings, "24GB")
