"""What may differ between the run that wrote a checkpoint and the one that goes on from it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.config.base import flatten, known_keys
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.types import Example

logger = logging.getLogger(__name__)

MAY_CHANGE = (
    "name",
    "output_dir",
    "resume",
    "data.eval",
    "data.eval_limit",
    "data.eval_image_root",
    "policy.gradient_checkpointing",
    "policy.head_chunk_tokens",
    "policy.trust_remote_code",
    "rollout.max_tokens_per_batch",
    "rollout.reward_timeout",
    "rollout.reward_workers",
    "objective.reference_device",
    "optim.lr",
    "optim.weight_decay",
    "optim.betas",
    "optim.eps",
    "optim.schedule",
    "optim.warmup_steps",
    "optim.max_grad_norm",
    "optim.max_steps",
    "optim.max_tokens_per_batch",
    "evaluation",
    "checkpoint",
    "logging",
)
"""Settings, or blocks of them, that a resumed run may set anew. All others belong to what the
checkpoint holds or to what the run is."""

MAY_CHANGE_BETWEEN_STEPS = (
    "policy.engine",
    "rollout",
    "objective.loss_type",
    "objective.kl_estimator",
    "objective.kl_in",
    "objective.use_bias_correction_kl",
    "objective.importance_sampling_level",
    "objective.sampler_correction",
    "objective.sampler_correction_cap",
    "objective.advantage_estimator",
    "objective.scale_rewards",
    "objective.normalize_each_reward",
    "objective.epsilon",
    "objective.epsilon_high",
    "objective.delta",
    "objective.num_iterations",
    "objective.mask_truncated_completions",
    "objective.entropy_coef",
    "optim.prompts_per_step",
)
"""Settings that may change too, unless the checkpoint stands in the middle of a step, whose
completions were sampled and judged by them."""

BY_ROWS = (
    "data.train",
    "data.train_limit",
    "data.image_root",
    "data.columns",
    "data.on_bad_row",
    "data.max_image_pixels",
)
"""Settings that may change as long as they lead to the same training examples."""


_KEYS = frozenset(known_keys(Settings))


def plain_settings(settings: Settings) -> dict[str, Any]:
    """The settings by dotted key, in what JSON can hold."""
    return flatten(settings.model_dump(mode="json"))


def check_same_settings(
    saved: Mapping[str, Any], settings: Settings, in_a_step: bool, checkpoint: str
) -> None:
    """Compare the settings that wrote a checkpoint with those that are to go on from it.

    Args:
        saved: ``plain_settings`` of the first.
        settings: the second.
        in_a_step: whether the checkpoint stands in the middle of a step.
        checkpoint: its name, for the message.

    Raises:
        UserError: with every setting that must not differ, and both its values.
    """
    free = (*MAY_CHANGE, *BY_ROWS, *(() if in_a_step else MAY_CHANGE_BETWEEN_STEPS))
    now = plain_settings(settings)
    problems = []
    for key in dict.fromkeys([*saved, *now]):
        if _within(key, free) or _unknown_then(key, saved):
            continue
        before, after = saved.get(key), now.get(key)
        if before == after:
            continue
        if _within(key, MAY_CHANGE_BETWEEN_STEPS):
            remedy = " (it may change, but not in the middle of a step)"
        else:
            remedy = ""
        problems.append(f"{key} was {_shown(before)} and is now {_shown(after)}{remedy}")
    if problems:
        raise UserError(
            f"{checkpoint} was written with other settings:\n{bullets(problems)}\n"
            "set them back to go on with it, or begin anew with another name=…"
        )


def _unknown_then(key: str, saved: Mapping[str, Any]) -> bool:
    """Whether the program that wrote the checkpoint did not know this setting."""
    blocks = [key[:end] for end, letter in enumerate(key) if letter == "."]
    return key not in saved and key in _KEYS and not any(block in saved for block in blocks)


def _within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def row_digests(examples: Sequence[Example]) -> Tensor:
    """(rows, 8) bytes: a fingerprint of each example's id, question, answer and images."""
    digests = [
        hashlib.blake2b(
            json.dumps(
                [
                    example.id,
                    example.question,
                    example.answer,
                    [(image.name, image.size) for image in example.images],
                ],
                sort_keys=True,
                default=str,
            ).encode(),
            digest_size=8,
        ).digest()
        for example in examples
    ]
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).reshape(-1, 8)


def check_same_data(
    saved: Tensor, source: str, examples: Sequence[Example], settings: Settings, checkpoint: str
) -> None:
    """Compare the training examples with those that a checkpoint was written with.

    The order in which examples are drawn depends on how many there are: with other rows a run
    would neither repeat nor complete what it has begun.

    Args:
        saved: ``row_digests`` of the earlier ones.
        source: their ``data.train``.
        examples: those of now.
        settings: says where they come from.
        checkpoint: its name, for the message.

    Raises:
        UserError: with the first example that differs.
    """
    now = row_digests(examples)
    if torch.equal(saved, now):
        return
    common = min(len(saved), len(now))
    differing = (saved[:common] != now[:common]).any(dim=1).nonzero()
    first = int(differing[0]) if len(differing) else common
    if first < len(examples):
        example = examples[first]
        what = f"the first that differs is number {first + 1}, now {example.id!r}"
    else:
        what = f"numbers {first + 1} to {len(saved)} are missing"
    raise UserError(
        f"the training examples have changed since {checkpoint} was written: {len(saved)} of "
        f"data.train={source} then, {len(now)} of data.train={settings.data.train} now; {what} "
        "(id, question, answer, and names and sizes of the images count). Put the data back as "
        "they were, or begin anew with another name=…"
    )


def warn_of_other_versions(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Say which libraries are not those of the checkpoint: the run may differ in the last bits."""
    changed = [
        f"{name} {saved.get(name)} → {version}"
        for name, version in now.items()
        if saved.get(name) != version
    ]
    if changed:
        logger.warning(
            "the checkpoint was written with other versions, so the run may go on with other "
            "rounding: %s",
            ", ".join(changed),
        )
