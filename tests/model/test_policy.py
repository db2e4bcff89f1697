"""The policy's prompts, samples, scores and counters, on small random models."""

from typing import Any

import pytest
import torch
from family_policies import build_family_policy
from recorded import record_calls
from tiny_models import (
    image_prompts,
    make_prompt,
    noise_example,
    pack_groups,
    sample_groups,
    tiny_policy,
)

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model import policy as policy_module
from vlm_grpo.model.engine.repeated import Counters

FAMILY = "qwen2_5_vl"
GENERATIONS = 3


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "repeated"])
def test_the_counters_show_what_sharing_a_prompt_saves_and_the_dummy_batch_scores_a_token(shared):
    policy = tiny_policy(FAMILY, shared=shared)
    prompts = image_prompts(policy, [[(60, 90)], []])
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    repeats = 1 if shared else GENERATIONS
    groups = sample_groups(policy, prompts, GENERATIONS)
    assert policy.counters == Counters(repeats, repeats * prompt_tokens, 0)  # one prompt has images
    policy.engine.clear_image_features()
    policy.counters.reset()
    policy.score(pack_groups(prompts, groups))
    # A completion's last token is predicted and never an input.
    completion_tokens = sum(len(c.token_ids) - 1 for group in groups for c in group)
    assert policy.counters == Counters(repeats, 0, repeats * prompt_tokens + completion_tokens)
    scores = policy.score(policy.dummy_batch())
    assert scores.logprobs.shape == (1,)
    assert torch.isfinite(scores.logprobs).all()


def test_each_step_lays_out_a_prompt_and_encodes_an_image_of_a_frozen_tower_once(monkeypatch):
    freeze = {"freeze": ["vision", "projector"]}
    policy = build_family_policy(FAMILY, shared=True, policy=freeze)
    asked = (56, "Why?"), (84, "Why?"), (56, "Where?")
    examples = [noise_example("a", [(56, height)], question) for height, question in asked]
    prompts = [make_prompt(policy, example) for example in examples]
    calls = record_calls(monkeypatch, policy.family, "lay_out")
    for step in (1, 2):
        policy.encode_images(prompts)
        assert policy.counters.encoder_passes == 2 * step  # of two images, not encoded again below
        groups = sample_groups(policy, prompts, length=3)
        policy.score(pack_groups(prompts, groups))
        assert [call.arguments[1] for call in calls] == prompts
        policy.engine.clear_image_features()
        calls.clear()


def test_decode_steps_are_captured_as_the_settings_and_the_model_say(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(policy_module, "get_capture", lambda *arguments: asked.extend(arguments))
    settings = load_settings("quickstart", [])
    policy_module.load_policy(settings)
    assert asked == [settings.rollout, True, True]
