"""Clips in requests to a vLLM server, as the pixels of their frames.

Of a video, vLLM chooses and resizes the frames and writes their times by its own rules. A model
that has the times as texts between its frames reads two frames as one image, however; as such they
are sent, in the form in which vLLM's own processes exchange what they have prepared.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Prompt

_TOLERANCE = 0.01
"""Largest distance of a pixel's value from a whole number; rounding in float32 is far smaller."""
_TENSOR = 3
"""vLLM's number for the bytes of a tensor among MessagePack's extensions."""


def build_features(policy: Policy, prompt: Prompt) -> dict[str, Any]:
    """Build the part of a request that holds the images and frames of a prompt with clips.

    The server inserts no tokens for them: the request needs all of the prompt's.

    Raises:
        UserError: the server would normalize the pixels in another way.
    """
    items = []
    for image in policy.family.split_images(prompt):
        try:
            pixels = revert_normalization(image["pixel_values"], policy.processor.image_processor)
        except ValueError as error:
            raise UserError(f"{prompt.example.name}: {error}") from error
        grid = image["image_grid_thw"][0].clone()
        grid[0] = 1
        items += [_pack_image(part, grid) for part in pixels.split(int(grid.prod()))]
    return {
        "mm_hashes": {"image": [hashlib.sha256(item).hexdigest() for item in items]},
        "mm_placeholders": {"image": list(_find_places(policy, prompt))},
        "kwargs_data": {"image": [base64.b64encode(item).decode() for item in items]},
    }


def revert_normalization(
    patches: Float[Tensor, "patches values"], image_processor: Any
) -> UInt8[Tensor, "patches values"]:
    """Return the pixels of normalized patches, which vLLM normalizes in the model.

    Raises:
        ValueError: they were normalized otherwise than images, as which vLLM takes them.
    """
    mean, std = (
        torch.tensor(getattr(image_processor, f"image_{name}"))[:, None] for name in ("mean", "std")
    )
    channels = patches.float().unflatten(1, (len(mean), -1))
    values = (channels * std + mean) / image_processor.rescale_factor
    pixels = values.round().clamp(0, 255)
    if (values - pixels).abs().max() > _TOLERANCE:
        raise ValueError(
            "the model's processor normalizes the pixels of its clip otherwise than those of an "
            "image, which vLLM does not: set rollout.sampler=policy"
        )
    return pixels.to(torch.uint8).flatten(1)


def _find_places(policy: Policy, prompt: Prompt) -> Iterator[dict[str, int]]:
    """Iterate over the places of images and pairs of frames among the prompt's tokens."""
    config, start = policy.model.config, 0
    media = (config.image_token_id, config.video_token_id)
    for is_medium, tokens in groupby(prompt.token_ids, media.__contains__):
        length = len(list(tokens))
        if is_medium:
            yield {"offset": start, "length": length}
        start += length


def _pack_image(pixels: UInt8[Tensor, "patches values"], grid: Int[Tensor, " axes"]) -> bytes:
    """Encode an image as vLLM's ``MultiModalKwargsItem``."""
    slices = [[0, len(pixels), None]]
    return _pack(
        {
            "pixel_values": {
                "data": ["uint8", list(pixels.shape), pixels.numpy().tobytes()],
                "field": ["flat", {"slices": slices, "dim": 0, "keep_on_cpu": False}],
            },
            "image_grid_thw": {
                "data": ["int64", [3], grid.long().numpy().tobytes()],
                "field": ["batched", {"keep_on_cpu": True}],
            },
        }
    )


def _pack(value: Any) -> bytes:
    """Encode a value by MessagePack: small dicts, lists and texts, numbers, and tensors' bytes."""
    match value:
        case dict():
            parts = [_pack(part) for item in value.items() for part in item]
            return bytes([0x80 + len(value)]) + b"".join(parts)
        case list():
            return bytes([0x90 + len(value)]) + b"".join(map(_pack, value))
        case str():
            return bytes([0xA0 + len(value)]) + value.encode()
        case bytes():
            return struct.pack(">BIB", 0xC9, len(value), _TENSOR) + value
        case bool() | None:
            return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case _:
            return struct.pack(">BI", 0xCE, value)
