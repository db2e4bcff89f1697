"""Clips in requests: the pixels and places of their frames."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import read_calls
from small_runs import make_trainer, read_metrics, save_tiny_model
from tiny_models import make_prompt, noise_clip, noise_example, tiny_policy
from video_files import make_video

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve.requests import build_request, revert_normalization
from vlm_grpo.types import Example

IMAGE = noise_example("i", [(56, 84)], seed=3).images[0]
CLIP = noise_clip("c", (96, 64), 5, seed=1)  # whole tokens; the last pair has half
MIXED = Example("a", (IMAGE, CLIP), "<image> in <image>?", 0)


@pytest.fixture
def policy() -> Policy:
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


def build(policy: Policy, example: Example) -> tuple[Any, Any]:
    """Return an example's prompt and the request for it."""
    prompt = make_prompt(policy, example)
    sampling = SamplingSettings(policy.distribution, 4)
    return prompt, build_request(policy, prompt, sampling, range(2), (0, 0))


def test_the_server_gets_each_image_and_pair_of_frames_with_its_place(policy: Policy) -> None:
    prompt, request = build(policy, MIXED)
    assert request["token_ids"] == list(prompt.token_ids)  # complete: nothing is inserted
    assert "content_parts" not in request
    features = request["features"]
    sent = [unpack(base64.b64decode(item)) for item in features["kwargs_data"]["image"]]
    assert [rest for _, rest in sent] == [b""] * 4  # an image and three pairs of frames
    config = policy.model.config
    media = {config.image_token_id, config.video_token_id}
    inside: list[int] = []
    for (item, _), place in zip(sent, features["mm_placeholders"]["image"], strict=True):
        frames, height, width = read_tensor(item["image_grid_thw"])
        assert (frames, place["length"]) == (1, height * width // 4)  # 2 × 2 patches per token
        assert len(read_tensor(item["pixel_values"])) == height * width
        inside += range(place["offset"], place["offset"] + place["length"])
    assert inside == [i for i, token in enumerate(prompt.token_ids) if token in media]
    assert len(set(features["mm_hashes"]["image"])) == 4  # the features are kept by these names


def test_the_frames_are_sent_without_loss(policy: Policy) -> None:
    _, request = build(policy, Example("a", (CLIP,), "When?", 0))
    items = [unpack(base64.b64decode(i))[0] for i in request["features"]["kwargs_data"]["image"]]
    frames = [np.asarray(frame) for frame in CLIP.load_frames()]
    frames.append(frames[-1])  # the processor repeats the last one of an odd number
    for index, item in enumerate(items):
        pixels = read_tensor(item["pixel_values"])
        assert pixels.dtype == np.uint8
        # Rows of 2 × 2 blocks of patches; values are colors, the two frames, rows and columns.
        blocks = pixels.reshape(2, 3, 2, 2, 3, 2, 16, 16).transpose(5, 0, 2, 6, 1, 3, 7, 4)
        assert np.array_equal(blocks.reshape(2, 64, 96, 3), frames[2 * index : 2 * index + 2])


def test_another_normalization_of_clips_than_of_images_is_an_error(policy: Policy) -> None:
    policy.processor.video_processor.image_mean = [0.4, 0.5, 0.5]
    with pytest.raises(UserError, match=r"example a: .* a clip unlike those .*sampler=policy"):
        build(policy, MIXED)


def test_rounding_of_the_processor_is_reverted(policy: Policy) -> None:
    processor = policy.processor.image_processor
    pixels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 256)
    mean, std = (torch.tensor(v)[:, None] for v in (processor.image_mean, processor.image_std))
    normalized = (pixels * processor.rescale_factor - mean) / std
    assert torch.equal(revert_normalization(normalized.flatten(1), processor), pixels.flatten(1))


def test_a_run_on_clips(settings: Any, fake: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(make_video(count=6, size=(64, 32), fps=2))
    rows = ({"id": str(i), "question": "?", "answer": "a", "videos": ["a.mp4"]} for i in range(3))
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(save_tiny_model(tmp_path / "qwen3", "qwen3_vl"))
    build = settings(model=model, data={"train": str(data), "train_limit": None})
    make_trainer(build).run()
    assert len(read_metrics(build.run_dir)) == 4
    asked = [call["body"] for call in read_calls(fake, "/inference/v1/generate")[1:]]
    assert len(asked) == 4 * 3
    # Three pairs of frames of two tokens each (32 × 32 pixels), with their times.
    pad = json.loads((Path(model) / "config.json").read_text())["video_token_id"]
    assert {body["token_ids"].count(pad) for body in asked} == {6}
