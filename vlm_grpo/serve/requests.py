"""Requests for completions to a vLLM server, and their responses.

The tokens of the prompt are sent, not its text, and the images after our resize, so that the server
has nothing to decide. It inserts the images' tokens; the prompt that it then reports must be ours.

Of a clip, vLLM would choose and resize the frames and write their times by its own rules. A model
with texts between the frames reads two frames as one image, so a prompt with clips is sent with all
of its tokens and the pixels of such images, in the form that vLLM's own processes exchange.
"""

import base64
import hashlib
import struct
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from vlm_grpo.errors import UserError
from vlm_grpo.media.images import encode_data_url
from vlm_grpo.model.engine.sampling import SamplingSettings, derive_seed
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve.server import ADAPTER_NAME, SERVED_NAME, WeightLabel
from vlm_grpo.types import Completion, Prompt, StopReason
from vlm_grpo.utils.http_json import ServiceError

# Addition to a banned token's logit, the largest that vLLM takes: a probability of e⁻¹⁰⁰.
BAN = -100.0
# Largest distance of a pixel's value from a whole number; rounding in float32 is far smaller.
_TOLERANCE = 0.01
_TENSOR = 3  # vLLM's number for the bytes of a tensor among MessagePack's extensions


def build_request(
    policy: Policy,
    prompt: Prompt,
    sampling: SamplingSettings,
    numbers: range,
    seed: Sequence[int | str],
    begun: int = 0,
) -> dict[str, Any]:
    """Build the request for a prompt's completions with these ``numbers`` in their group, which
    have ``begun`` tokens at the end of the prompt."""
    tokenize = partial(policy.tokenizer, add_special_tokens=False)
    first, *rest = prompt.parts or (prompt,)
    tokens = policy.tokenizer(first.text)["input_ids"]
    for part in rest:  # sampled tokens are sent as they are
        tokens += tokenize(part.text)["input_ids"] if part.text else part.token_ids
    distribution = sampling.distribution
    request: dict[str, Any] = {
        "model": SERVED_NAME if policy.adapters is None else ADAPTER_NAME,
        "token_ids": tokens,
        "return_token_ids": True,
        "sampling_params": {
            "n": len(numbers),
            "temperature": distribution.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            # vLLM adds 0, 1, … to it.
            "seed": derive_seed((*seed, *([begun] if begun else []))) + numbers.start,
            "max_tokens": sampling.max_completion_length - begun,
            "min_tokens": max(0, distribution.min_new_tokens - begun),
            "stop": list(sampling.stop),
            # Only our end tokens end a completion, whatever the server's copy of the model says.
            "ignore_eos": True,
            "stop_token_ids": list(distribution.eos),
            "logit_bias": {str(token): BAN for token in distribution.banned},
            "logprobs": 0,
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
        },
    }
    if any(image.kind == "video" for image in prompt.example.images):
        request["token_ids"] = list(prompt.token_ids)
        request["features"] = build_features(policy, prompt)
    elif prompt.example.images:
        images = policy.prompts.load_images(prompt.example)
        urls = [encode_data_url(image, compress_level=1) for image, _ in images]  # nothing is lost
        request["content_parts"] = [{"type": "image_url", "url": url} for url in urls]
    return request


def read_choices(
    policy: Policy, sampling: SamplingSettings, choices: Sequence[Any], label: WeightLabel
) -> tuple[Completion, ...]:
    """Return the completions in a response; ``ServiceError``: the server has given one up."""
    found = []
    for choice in sorted(choices, key=lambda choice: choice["index"]):
        if choice["finish_reason"] not in ("stop", "length"):
            raise ServiceError(f"a completion ended by {choice['finish_reason']}")
        token_ids = tuple(choice["token_ids"])
        logprobs = tuple(float(token["logprob"]) for token in choice["logprobs"]["content"])
        stop: StopReason = choice["finish_reason"]
        if stop == "stop" and token_ids[-1] in sampling.distribution.eos:
            stop = "eos"
        oldest = min(label.read(span["version"]) for span in choice["weight_versions"])
        text = policy.decode(token_ids)
        found.append(Completion(token_ids, logprobs, text, stop, version=oldest))
    return tuple(found)


def build_features(policy: Policy, prompt: Prompt) -> dict[str, Any]:
    """Build the part of a request that holds the images and frames of a prompt with clips."""
    items = []
    parts = prompt.parts or (prompt,)
    for image in (image for part in parts for image in policy.family.split_images(part)):
        try:
            pixels = revert_normalization(image["pixel_values"], policy.processor.image_processor)
        except ValueError as error:
            raise UserError(f"{prompt.example.name}: {error}") from error
        grid = image["image_grid_thw"][0].clone()
        grid[0] = 1
        items += [_pack_image(part, grid) for part in pixels.split(int(grid.prod()))]
    config, places, start = policy.model.config, list[dict[str, int]](), 0
    media = (config.image_token_id, config.video_token_id)
    for is_medium, tokens in groupby(prompt.token_ids, media.__contains__):
        length = len(list(tokens))
        places += [{"offset": start, "length": length}] if is_medium else []
        start += length
    return {
        "mm_hashes": {"image": [hashlib.sha256(item).hexdigest() for item in items]},
        "mm_placeholders": {"image": places},
        "kwargs_data": {"image": [base64.b64encode(item).decode() for item in items]},
    }


def revert_normalization(
    patches: Float[Tensor, "patches values"], image_processor: Any
) -> UInt8[Tensor, "patches values"]:
    """Return the pixels of normalized patches, which vLLM normalizes in the model."""
    mean, std = (
        torch.tensor(getattr(image_processor, f"image_{name}"))[:, None] for name in ("mean", "std")
    )
    channels = patches.float().unflatten(1, (len(mean), -1))
    values = (channels * std + mean) / image_processor.rescale_factor
    pixels = values.round().clamp(0, 255)
    if (values - pixels).abs().max() > _TOLERANCE:
        raise ValueError(
            "the model's processor normalizes the pixels of a clip unlike those of an image, "
            "which vLLM does not: set rollout.sampler=policy"
        )
    return pixels.to(torch.uint8).flatten(1)


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
