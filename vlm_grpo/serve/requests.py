"""Requests for completions to a vLLM server, and their responses.

The tokens of the prompt are sent, not its text, and the images after our resize, so that the server
has nothing to decide. It inserts the images' tokens; the prompt that it then reports must be ours.
A prompt with clips is sent with all of its tokens, and its images as ``clips`` prepares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vlm_grpo.errors import UserError
from vlm_grpo.media.image_decode import encode_data_url
from vlm_grpo.model.engine.sampling import SamplingSettings, derive_seed
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve.client import ADAPTER_NAME, SERVED_NAME, WeightLabel
from vlm_grpo.serve.clips import build_features
from vlm_grpo.types import Completion, Prompt, StopReason
from vlm_grpo.utils.http_json import ServiceError

BAN = -100.0
"""Addition to a banned token's logit, the largest that vLLM takes: a probability of e⁻¹⁰⁰."""

Group = tuple[Completion, ...]
"""The completions of one prompt."""


@dataclass
class Job:
    """A rollout to sample.

    Attributes:
        prompts: one prompt per group.
        sampling: the sampler's settings.
        num_generations: the numbers of each prompt's completions in their group.
        seeds: the prompts' seeds.
        version: version of the weights to sample with.
        future: receives the groups.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingSettings
    num_generations: Sequence[range]
    seeds: Sequence[Sequence[int | str]]
    version: int
    future: Future[list[Group]] = field(default_factory=Future)


def build_request(
    policy: Policy,
    prompt: Prompt,
    sampling: SamplingSettings,
    numbers: range,
    seed: Sequence[int | str],
) -> dict[str, Any]:
    """Build the request for a prompt's completions.

    Args:
        policy: the policy, whose prompts and special tokens the server must use.
        prompt: a prompt built by the policy.
        sampling: the sampler's settings.
        numbers: the numbers of the completions in their group; vLLM adds them to the seed.
        seed: seed of the prompt's random numbers.
    """
    distribution = sampling.distribution
    request: dict[str, Any] = {
        "model": SERVED_NAME if policy.adapters is None else ADAPTER_NAME,
        "token_ids": policy.tokenizer(prompt.text)["input_ids"],
        "return_token_ids": True,
        "sampling_params": {
            "n": len(numbers),
            "temperature": distribution.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": derive_seed(seed) + numbers.start,
            "max_tokens": sampling.max_completion_length,
            "min_tokens": distribution.min_new_tokens,
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
    """Return the completions in a response.

    Raises:
        ServiceError: the server has given up a completion.
    """
    ordered = sorted(choices, key=lambda choice: choice["index"])
    return tuple(_read_choice(policy, sampling, choice, label) for choice in ordered)


def _read_choice(
    policy: Policy, sampling: SamplingSettings, choice: Any, label: WeightLabel
) -> Completion:
    if choice["finish_reason"] not in ("stop", "length"):
        raise ServiceError(f"a completion ended by {choice['finish_reason']}")
    token_ids = tuple(choice["token_ids"])
    logprobs = tuple(float(token["logprob"]) for token in choice["logprobs"]["content"])
    stop: StopReason = "length"
    if choice["finish_reason"] == "stop":
        stop = "eos" if token_ids[-1] in sampling.distribution.eos else "stop"
    oldest = min(label.read(span["version"]) for span in choice["weight_versions"])
    return Completion(token_ids, logprobs, policy.decode(token_ids), stop, version=oldest)


def check_prompt(policy: Policy, prompt: Prompt, found: Sequence[int]) -> None:
    """Check that the server's prompt has our tokens.

    Raises:
        UserError: it has others; the message names the likely cause.
    """
    ours = list(prompt.token_ids)
    if ours == found:
        return
    name = prompt.example.name
    images = set(policy.family.media_tokens(policy.processor))
    counts = [sum(token in images for token in tokens) for tokens in (ours, found)]
    if counts[0] != counts[1]:
        raise UserError(
            f"{name}: its images have {counts[0]} tokens here and {counts[1]} in the vLLM server: "
            "the two resize images differently; start the server by vlm-grpo serve with the "
            "same policy.min_pixels and policy.max_pixels"
        )
    place = next(
        (i for i, (a, b) in enumerate(zip(ours, found, strict=False)) if a != b),
        min(len(ours), len(found)),
    )
    raise UserError(
        f"{name}: the vLLM server's prompt differs from token {place} on "
        f"({policy.tokenizer.decode(found[place : place + 5])!r} instead of "
        f"{policy.tokenizer.decode(ours[place : place + 5])!r}): it has another tokenizer; start "
        "it with the run's model, and compare the versions of transformers"
    )
