"""The policy's prompts, samples, scores and counters, on small random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_policies import build_family_policy
from jaxtyping import TypeCheckError
from tiny_models import (
    make_prompt,
    noise_example,
    pack_groups,
    sample_groups,
    tiny_policy,
)

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model import policy as policy_module
from vlm_grpo.model.engine.logprobs import TokenScores
from vlm_grpo.model.engine.repeated import Counters
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.engine.shared import SharedEngine
from vlm_grpo.model.families import PromptLayout
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Completion, Prompt

FAMILY = "qwen2_5_vl"
LENGTH = 6
GENERATIONS = 3
BOTH_ENGINES = pytest.mark.parametrize("shared", [True, False], ids=["shared", "repeated"])


def make_prompts(policy: Policy) -> list[Prompt]:
    examples = [noise_example("one", [(60, 90)]), noise_example("none", [], "What? " * 5)]
    return [make_prompt(policy, example) for example in examples]


def sample(
    policy: Policy, prompts: list[Prompt], stop: tuple[str, ...] = ()
) -> list[tuple[Completion, ...]]:
    settings = SamplingSettings(policy.distribution, LENGTH, stop, with_entropies=True)
    seeds = [(0, prompt.example.id) for prompt in prompts]
    return policy.sample(prompts, settings, GENERATIONS, seeds, max_tokens=10_000)


def test_examples_that_share_an_image_decode_it_once():
    policy = tiny_policy(FAMILY)
    prompts = [make_prompt(policy, noise_example("a", [(60, 90)])) for _ in range(3)]
    assert [prompt.image_decodes for prompt in prompts] == [1, 0, 0]


@BOTH_ENGINES
def test_sampled_log_probabilities_equal_scored_ones(shared):
    policy = tiny_policy(FAMILY, shared=shared, dtype=torch.float64)
    prompts = make_prompts(policy)
    groups = sample(policy, prompts)
    assert [len(group) for group in groups] == [GENERATIONS] * len(prompts)
    completions = [completion for group in groups for completion in group]
    scores = policy.score(pack_groups(prompts, groups), with_entropy=True)
    sampled = torch.tensor([value for c in completions for value in c.logprobs])
    entropies = torch.tensor([value for c in completions for value in c.entropies])
    # The sampler records float32, whose rounding of values below 10 is under 1e-6.
    assert (scores.logprobs - sampled).abs().max() < 1e-5
    assert scores.entropies is not None
    assert (scores.entropies - entropies).abs().max() < 1e-5
    assert scores.logprobs.requires_grad


def test_a_completion_ends_at_the_end_token_a_stop_string_or_the_length_limit():
    policy = tiny_policy(FAMILY)
    prompts = make_prompts(policy)
    # One token per byte: a random model soon generates a character that is a stop string.
    characters = tuple(chr(code) for code in range(32, 80))
    stopped = [c for group in sample(policy, prompts, stop=characters) for c in group]
    assert any(c.stop == "stop" for c in stopped)
    for completion in stopped + [c for group in sample(policy, prompts) for c in group]:
        if completion.stop == "length":
            assert len(completion.token_ids) == LENGTH
        elif completion.stop == "eos":
            assert completion.token_ids[-1] in policy.distribution.eos
        else:
            assert any(character in completion.text for character in characters)


@BOTH_ENGINES
def test_the_counters_show_what_sharing_a_prompt_saves(shared):
    policy = tiny_policy(FAMILY, shared=shared)
    prompts = make_prompts(policy)
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    repeats = 1 if shared else GENERATIONS
    groups = sample(policy, prompts)
    assert policy.counters == Counters(repeats, repeats * prompt_tokens, 0)  # one prompt has images
    policy.engine.clear_image_features()
    policy.counters.reset()
    policy.score(pack_groups(prompts, groups))
    # A completion's last token is predicted and never an input.
    completion_tokens = sum(len(c.token_ids) - 1 for group in groups for c in group)
    assert policy.counters == Counters(repeats, 0, repeats * prompt_tokens + completion_tokens)


def test_a_frozen_tower_encodes_an_image_once_until_the_cache_is_cleared():
    freeze = {"freeze": ["vision", "projector"]}
    policy = build_family_policy(FAMILY, shared=True, policy=freeze)
    assert isinstance(policy.engine, SharedEngine)
    assert not policy.engine.encoder.is_trained
    prompts = make_prompts(policy)
    policy.encode_images(prompts)
    sample(policy, prompts)
    assert policy.counters.encoder_passes == 1
    policy.engine.clear_image_features()
    policy.encode_images(prompts)
    assert policy.counters.encoder_passes == 2


@BOTH_ENGINES
def test_the_dummy_batch_scores_one_token(shared):
    policy = tiny_policy(FAMILY, shared=shared)
    scores = policy.score(policy.dummy_batch())
    assert scores.logprobs.shape == (1,)
    assert torch.isfinite(scores.logprobs).all()


def test_token_scores_of_different_lengths_are_refused():
    with pytest.raises(TypeCheckError):
        TokenScores(torch.zeros(2), torch.zeros(3))


def test_a_prompt_is_laid_out_once_per_step(monkeypatch):
    policy = tiny_policy("qwen2_5_vl")
    prompts = [
        make_prompt(policy, noise_example("a", [(56, 56)], "Why?")),
        make_prompt(policy, noise_example("a", [(56, 84)], "Why?")),
        make_prompt(policy, noise_example("a", [(56, 56)], "Where?")),
    ]
    laid_out: list[Prompt] = []
    lay_out = policy.family.lay_out

    def record(model: Any, prompt: Prompt) -> PromptLayout:
        laid_out.append(prompt)
        return lay_out(model, prompt)

    monkeypatch.setattr(policy.family, "lay_out", record)
    for _ in range(2):
        groups = sample_groups(policy, prompts, length=3)
        policy.score(pack_groups(prompts, groups))
        assert laid_out == prompts
        policy.engine.clear_image_features()
        laid_out.clear()


def test_decode_steps_are_captured_as_the_settings_and_the_model_say(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(policy_module, "get_capture", lambda *arguments: asked.extend(arguments))
    settings = load_settings("quickstart", [])
    loaded = policy_module.load_policy(settings)
    assert asked == [settings.rollout, True, True, loaded.model.config]
