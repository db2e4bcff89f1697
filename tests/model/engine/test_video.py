"""Clips and images: both forms sample equal tokens; each clip is encoded once, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_policies import build_family_policy
from tiny_models import (
    FAMILIES,
    make_prompt,
    mixed_prompts,
    noise_clip,
    noise_example,
    pack_groups,
    sample_groups,
    sampled_logprobs,
    tiny_policy,
)

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning.prompt_sizes import PromptCounter
from vlm_grpo.task import PlainQuestion
from vlm_grpo.training.methods import build_methods
from vlm_grpo.training.rollout import select_usable
from vlm_grpo.types import Example, Prompt

IMAGE = noise_example("i", [(56, 84)], seed=3).images[0]
EXAMPLES = [
    Example("odd", (noise_clip("c", (60, 40), 5, seed=1),), "When?", 0),  # half a last pair
    Example("mixed", (IMAGE, noise_clip("d", (56, 90), 4, seed=2)), "<image> in <image>?", 0),
    noise_example("no image", [], "Hello there"),
    Example("clips", (noise_clip("e", (28, 56), 2), noise_clip("f", (84, 28), 6)), "Which?", 0),
]
LONG = Example("long", (noise_clip("l", (28, 28), 20, seed=4, fps=0.5),), "?", 0)
"""40 seconds: in Qwen2.5-VL, its last frames have larger positions than the text behind it."""


def build_prompts(policy: Policy, *more: Example) -> list[Prompt]:
    return [make_prompt(policy, example) for example in (*EXAMPLES, *more)]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_sample_as_generate_and_score_what_they_sampled(family: str) -> None:
    tokens = []
    for shared in (True, False):
        policy = tiny_policy(family, shared, torch.float64)
        prompts = [*build_prompts(policy, LONG), *mixed_prompts(policy, 4)]
        groups = sample_groups(policy, prompts)  # without sharing, by transformers' generate
        tokens.append([[c.token_ids for c in group] for group in groups])
        with torch.no_grad():
            scored = policy.score(pack_groups(prompts, groups)).logprobs
        assert (scored - sampled_logprobs(groups)).abs().max() < 1e-6
    assert tokens[0] == tokens[1]


def test_a_clip_is_encoded_once_per_group() -> None:
    policy = tiny_policy("qwen2_5_vl")
    prompts = build_prompts(policy)
    assert [prompt.image_decodes for prompt in prompts] == [1, 2, 0, 2]
    groups = sample_groups(policy, prompts, group_size=5)
    assert policy.counters.encoder_passes == 5  # four clips and an image, for 20 completions
    policy.counters.encoder_passes = 0
    policy.score(pack_groups(prompts, groups))
    assert policy.counters.encoder_passes == 5  # with gradient, once more


def test_other_families_refuse_videos() -> None:
    policy = build_family_policy("internvl", torch.float32)
    with pytest.raises(UserError, match="example odd: it has a video, which only Qwen2-VL"):
        make_prompt(policy, EXAMPLES[0])


SERVERS = ["rollout.sampler=vllm", "rollout.vllm.urls=[http://127.0.0.1:9]"]


@pytest.mark.parametrize(
    "overrides",
    [
        SERVERS,
        ["rollout.noise.strength=400"],
        ["objective.perception.kl_coef=0.01"],
    ],
)
def test_methods_without_videos_refuse_them_before_the_run(overrides: list[str]) -> None:
    settings, policy = load_settings("quickstart", overrides), tiny_policy("qwen2_vl")
    with pytest.raises(UserError, match=r"example odd: (rollout|objective)\.[a-z=]* does not sup"):
        select_usable(policy, EXAMPLES, PlainQuestion(), settings, build_methods(settings))
    usable = select_usable(policy, EXAMPLES, PlainQuestion(), load_settings("quickstart"), {})
    assert len(usable) == len(EXAMPLES)


def test_qwen3_vl_takes_videos_in_rollouts_of_servers() -> None:
    settings = load_settings("quickstart", SERVERS)
    usable = select_usable(tiny_policy("qwen3_vl"), EXAMPLES, PlainQuestion(), settings, {})
    assert len(usable) == len(EXAMPLES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pixels_of_a_clip_are_bounded_and_its_tokens_counted(family: str) -> None:
    policy = tiny_policy(family)
    assert policy.budget is not None
    policy.prompts.budget = replace(policy.budget, video_pixels=12 * 64 * 64)
    clip = Example("large", (noise_clip("g", (300, 300), 12), IMAGE), "?", 0)
    resized = policy.prompts.with_resized_sizes(clip).images
    assert resized[0].resized_size in [(56, 56), (64, 64)]  # whole tokens
    assert resized[1].resized_size in [(56, 84), (64, 96)]
    counted = PromptCounter([clip, *EXAMPLES], PlainQuestion(), policy.prompts)
    prompts = build_prompts(policy, clip)
    tokens = [size.tokens for size in counted.count(policy.prompts.budget)]
    assert tokens == sorted(len(prompt.token_ids) for prompt in prompts)
