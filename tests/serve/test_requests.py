"""Requests for completions, and how responses are read."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_models import make_prompt, noise_example, tiny_policy

from vlm_grpo.errors import UserError
from vlm_grpo.media.images import DiffusionNoise
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve.requests import build_request, check_prompt, read_choices
from vlm_grpo.serve.server import WeightLabel
from vlm_grpo.utils.http_json import ServiceError

LABEL = WeightLabel("weights", "run")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy("qwen2_5_vl")


def make_choice(index: int = 0, tokens: Any = (1, 2), reason: str = "stop", **changes: Any) -> Any:
    return {
        "index": index,
        "token_ids": list(tokens),
        "finish_reason": reason,
        "logprobs": {"content": [{"logprob": -token / 2} for token in tokens]},
        "weight_versions": [{"version": LABEL.write(4)}],
        **changes,
    }


def test_everything_that_changes_the_distribution_is_sent(policy: Policy) -> None:
    prompt = make_prompt(policy, noise_example("a", []))
    eos = policy.distribution.eos
    distribution = replace(policy.distribution, temperature=0.7, banned=(5, 9), min_new_tokens=2)
    sampling = SamplingSettings(distribution, 17, stop=("###",), top_k=11, top_p=0.9, min_p=0.05)
    request = build_request(policy, prompt, sampling, range(6), (0, 3))
    seed = request["sampling_params"].pop("seed")
    assert request == {
        "model": "policy",  # the name under which runs serve full weights
        "token_ids": list(prompt.token_ids),  # without images nothing is inserted
        "return_token_ids": True,
        "sampling_params": {
            "n": 6,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 11,
            "min_p": 0.05,
            "max_tokens": 17,
            "min_tokens": 2,
            "stop": ["###"],
            "ignore_eos": True,
            "stop_token_ids": list(eos),
            "logit_bias": {"5": -100.0, "9": -100.0},
            "logprobs": 0,
            "detokenize": True,
            "skip_special_tokens": False,
        },
    }
    again, other = (build_request(policy, prompt, sampling, range(6), (0, n)) for n in (3, 4))
    seeds = [seed, *(r["sampling_params"]["seed"] for r in (again, other))]
    assert seeds[0] == seeds[1] != seeds[2]
    plain = build_request(policy, prompt, replace(sampling, stop=()), range(6), (0, 3))
    assert plain["sampling_params"]["detokenize"] is False  # no text to look into


def test_the_noisy_part_of_a_group_has_its_images_and_its_seeds(policy: Policy) -> None:
    example = noise_example("a", [(56, 28)])
    noisy = make_prompt(policy, example.with_noise(DiffusionNoise(400, (0, 3))))
    sampling = SamplingSettings(policy.distribution, 4)
    clean, other = (
        build_request(policy, prompt, sampling, numbers, (0, 3))
        for prompt, numbers in ((make_prompt(policy, example), range(4)), (noisy, range(4, 6)))
    )
    assert clean["token_ids"] == other["token_ids"]
    assert clean["content_parts"] != other["content_parts"]
    assert other["sampling_params"]["n"] == 2
    # vLLM gives the n-th completion of a request the seed of the request + n.
    first, seed = (request["sampling_params"]["seed"] for request in (clean, other))
    assert seed == first + 4


def test_images_are_sent_after_our_resize_without_loss(policy: Policy) -> None:
    example = noise_example("a", [(131, 60), (40, 90)])
    prompt = make_prompt(policy, example)
    sampling = SamplingSettings(policy.distribution, 4)
    request = build_request(policy, prompt, sampling, range(2), (0, 0))
    image_token = policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert request["token_ids"].count(image_token) == 2  # the server repeats them
    assert "features" not in request
    sent = [
        Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2])))
        for part in request["content_parts"]
    ]
    assert [image.size for image in sent] == [i.resized_size for i in prompt.example.images]
    ours = [image for image, _ in policy.prompts.load_images(prompt.example)]
    for image, own in zip(sent, ours, strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(own.convert("RGB")))
    side = 28  # of a merged patch in pixels
    expanded = sum((w // side) * (h // side) for w, h in (image.size for image in sent))
    assert list(prompt.token_ids).count(image_token) == expanded


def test_choices_are_read_in_order(policy: Policy) -> None:
    (eos,) = policy.distribution.eos
    sampling = SamplingSettings(policy.distribution, 4, stop=("b",))
    choices = [
        make_choice(2, (65, 66), "stop"),
        make_choice(0, (65, eos)),
        make_choice(1, (65, 65, 65, 65), "length"),
    ]
    group = read_choices(policy, sampling, choices, LABEL)
    assert [c.token_ids for c in group] == [(65, eos), (65,) * 4, (65, 66)]
    assert [c.stop for c in group] == ["eos", "length", "stop"]
    assert [c.text for c in group] == [policy.decode(c.token_ids) for c in group]
    assert group[1].logprobs == (-32.5,) * 4
    assert {c.version for c in group} == {4}


def test_a_completion_has_the_version_of_its_oldest_weights(policy: Policy) -> None:
    sampling = SamplingSettings(policy.distribution, 4)
    names = [LABEL.write(5), LABEL.write(3), LABEL.write(4)]
    spans = [{"version": name} for name in names]
    (found,) = read_choices(policy, sampling, [make_choice(weight_versions=spans)], LABEL)
    assert found.version == 3
    other = [{"version": LABEL.write(5)}, {"version": "weights/another/9"}]
    (found,) = read_choices(policy, sampling, [make_choice(weight_versions=other)], LABEL)
    assert found.version == -1


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_completion_that_the_server_has_given_up(policy: Policy, reason: Any) -> None:
    sampling = SamplingSettings(policy.distribution, 4)
    with pytest.raises(ServiceError, match=f"ended by {reason}"):
        read_choices(policy, sampling, [make_choice(reason=reason)], LABEL)


def test_prompts_with_other_tokens_are_refused(policy: Policy) -> None:
    prompt = make_prompt(policy, noise_example("a", [(60, 60)], "What?"))
    ours = list(prompt.token_ids)
    check_prompt(policy, prompt, ours)
    image_token = policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    place = ours.index(image_token)
    count = ours.count(image_token)
    with pytest.raises(UserError, match=rf"example a: its images have {count} tokens here and "):
        check_prompt(policy, prompt, [*ours[:place], image_token, *ours[place:]])
    changed = [*ours[:-3], ours[-3] + 1, *ours[-2:]]
    with pytest.raises(UserError, match=rf"from token {len(ours) - 3} on .* another tokenizer"):
        check_prompt(policy, prompt, changed)
    with pytest.raises(UserError, match=rf"from token {len(ours) - 1} on"):
        check_prompt(policy, prompt, ours[:-1])
    with pytest.raises(UserError, match=rf"from token {len(ours)} on"):
        check_prompt(policy, prompt, [*ours, 65])
