"""Requests for completions, with the pixels and places of clips, and how responses are read."""

import base64
import io
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_models import make_prompt, noise_clip, noise_example, tiny_policy

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.packing import Path
from vlm_grpo.model.engine.repeated import extend_prompt
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve.requests import build_features, build_request, read_choices
from vlm_grpo.serve.server import WeightLabel
from vlm_grpo.training.methods.noise import DiffusionNoise
from vlm_grpo.types import Example, Observation
from vlm_grpo.utils.http_json import ServiceError

LABEL = WeightLabel("weights", "run")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy("qwen2_5_vl")


def build(policy: Policy, example: Example, numbers: range = range(2)) -> tuple[Any, Any]:
    prompt = make_prompt(policy, example)
    sampling = SamplingSettings(policy.distribution, 4)
    return prompt, build_request(policy, prompt, sampling, numbers, (0, 3))


def make_choice(index: int = 0, tokens: Any = (1, 2), reason: Any = "stop", **changes: Any) -> Any:
    return {
        "index": index,
        "token_ids": list(tokens),
        "finish_reason": reason,
        "logprobs": {"content": [{"logprob": -token / 2} for token in tokens]},
        "weight_versions": [{"version": LABEL.write(4)}],
        **changes,
    }


def test_everything_that_changes_the_distribution_is_sent(policy):
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


def test_the_noisy_part_of_a_group_has_its_images_and_its_seeds(policy):
    example = noise_example("a", [(56, 28)])
    _, clean = build(policy, example, range(4))
    _, other = build(
        policy, example.with_changes(lambda n: DiffusionNoise(400, (0, 3, n))), range(4, 6)
    )
    assert clean["token_ids"] == other["token_ids"]
    assert clean["content_parts"] != other["content_parts"]
    assert other["sampling_params"]["n"] == 2
    # vLLM gives the n-th completion of a request the seed of the request + n.
    first, seed = (request["sampling_params"]["seed"] for request in (clean, other))
    assert seed == first + 4


def test_images_are_sent_after_our_resize_without_loss(policy):
    prompt, request = build(policy, noise_example("a", [(131, 60), (40, 90)]))
    image_token = policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert request["token_ids"].count(image_token) == 2  # the server repeats them
    assert "features" not in request
    sent = [
        Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2])))
        for part in request["content_parts"]
    ]
    assert [image.size for image in sent] == [i.resized_size for i in prompt.example.images]
    for image, (own, _) in zip(sent, policy.prompts.load_images(prompt.example), strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(own.convert("RGB")))
    side = 28  # of a merged patch in pixels
    expanded = sum((w // side) * (h // side) for w, h in (image.size for image in sent))
    assert list(prompt.token_ids).count(image_token) == expanded


def test_choices_are_read_in_order_with_the_version_of_their_oldest_weights(policy):
    sampling, (eos,) = (
        SamplingSettings(policy.distribution, 4, stop=("b",)),
        policy.distribution.eos,
    )
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
    for names, oldest in (
        ([LABEL.write(n) for n in (5, 3, 4)], 3),
        ([LABEL.write(5), "weights/another/9"], -1),
    ):
        choice = make_choice(weight_versions=[{"version": name} for name in names])
        assert read_choices(policy, sampling, [choice], LABEL)[0].version == oldest
    for reason in ("abort", "error", None):  # the server has given it up
        with pytest.raises(ServiceError, match=f"ended by {reason}"):
            read_choices(policy, sampling, [make_choice(reason=reason)], LABEL)


IMAGE = noise_example("i", [(56, 84)], seed=3).images[0]
CLIP = noise_clip("c", (96, 64), 5, seed=1)  # whole tokens; the last pair has half
MIXED = Example("a", (IMAGE, CLIP), "<image> in <image>?", 0)


@pytest.fixture
def clip_policy() -> Policy:
    return tiny_policy("qwen3_vl")


def unpack(data: bytes) -> tuple[Any, bytes]:
    """Decode a value by MessagePack's specification; return it and the bytes after it."""
    kind, rest = data[0], data[1:]
    if 0x80 <= kind < 0xA0:
        found: list[Any] = []
        for _ in range(2 * (kind - 0x80) if kind < 0x90 else kind - 0x90):
            value, rest = unpack(rest)
            found.append(value)
        return (dict(zip(found[::2], found[1::2], strict=True)) if kind < 0x90 else found), rest
    if 0xA0 <= kind < 0xC0:
        return rest[: kind - 0xA0].decode(), rest[kind - 0xA0 :]
    if kind == 0xC9:  # an extension with a length of 32 bits
        length, code = struct.unpack(">IB", rest[:5])
        assert code == 3  # of vLLM's v1/serial_utils.py: raw bytes
        return rest[5 : 5 + length], rest[5 + length :]
    if kind == 0xCE:
        return struct.unpack(">I", rest[:4])[0], rest[4:]
    return {0xC0: None, 0xC2: False, 0xC3: True}[kind], rest


def read_tensor(part: Any) -> np.ndarray:
    name, shape, data = part["data"]
    return np.frombuffer(data, dtype=name).reshape(shape)


def test_the_server_gets_each_image_and_pair_of_frames_with_its_place_and_no_loss(clip_policy):
    prompt, request = build(clip_policy, MIXED)
    assert request["token_ids"] == list(prompt.token_ids)  # complete: nothing is inserted
    assert "content_parts" not in request
    features = request["features"]
    sent = [unpack(base64.b64decode(item)) for item in features["kwargs_data"]["image"]]
    assert [rest for _, rest in sent] == [b""] * 4  # an image and three pairs of frames
    config = clip_policy.model.config
    media = {config.image_token_id, config.video_token_id}
    inside: list[int] = []
    for (item, _), place in zip(sent, features["mm_placeholders"]["image"], strict=True):
        frames, height, width = read_tensor(item["image_grid_thw"])
        assert (frames, place["length"]) == (1, height * width // 4)  # 2 × 2 patches per token
        assert len(read_tensor(item["pixel_values"])) == height * width
        inside += range(place["offset"], place["offset"] + place["length"])
    assert inside == [i for i, token in enumerate(prompt.token_ids) if token in media]
    assert len(set(features["mm_hashes"]["image"])) == 4  # the features are kept by these names

    frames = [np.asarray(frame) for frame in CLIP.load_frames()]
    frames.append(frames[-1])  # the processor repeats the last one of an odd number
    for index, (item, _) in enumerate(sent[1:]):
        pixels = read_tensor(item["pixel_values"])
        assert pixels.dtype == np.uint8
        # Rows of 2 × 2 blocks of patches; values are colors, the two frames, rows and columns.
        blocks = pixels.reshape(2, 3, 2, 2, 3, 2, 16, 16).transpose(5, 0, 2, 6, 1, 3, 7, 4)
        assert np.array_equal(blocks.reshape(2, 64, 96, 3), frames[2 * index : 2 * index + 2])


def test_an_observed_image_is_sent_behind_the_frames_of_a_clip_normalized_alike(clip_policy):
    clip, image = (
        make_prompt(clip_policy, Example("a", (part,), "When?", 0)) for part in (CLIP, IMAGE)
    )
    whole = extend_prompt(clip, Path((7, 8), (Observation(2, image),)))
    found = build_features(clip_policy, whole)
    expected = [build_features(clip_policy, prompt) for prompt in (clip, image)]
    for kind, name in (("kwargs_data", "image"), ("mm_hashes", "image")):
        assert found[kind][name] == [item for part in expected for item in part[kind][name]]
    places = [part["mm_placeholders"]["image"] for part in expected]
    behind = len(clip.token_ids) + 2
    moved = [{**place, "offset": place["offset"] + behind} for place in places[1]]
    assert found["mm_placeholders"]["image"] == [*places[0], *moved]
    # Another normalization of clips than of images is an error.
    clip_policy.processor.video_processor.image_mean = [0.4, 0.5, 0.5]
    with pytest.raises(UserError, match=r"example a: .* a clip unlike those .*sampler=policy"):
        build(clip_policy, MIXED)
