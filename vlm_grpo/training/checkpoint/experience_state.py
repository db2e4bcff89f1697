"""The form in a checkpoint of what a run has learned of its examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.training.checkpoint.partial_step import (
    join_tokens,
    restore_completion,
    serialize_completions,
)
from vlm_grpo.training.experience import Experience, KeptGroup


def serialize_experience(experience: Experience) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the groups to replay as values that JSON can hold, and the tensors of everything."""
    values, tensors = [], {}
    if experience.curriculum is not None:
        tensors["posterior"] = torch.from_numpy(experience.curriculum.posterior).clone()
    if experience.replay is not None:
        groups = experience.replay.groups
        tensors |= join_tokens([c for group in groups for c in group.completions])
        for group in groups:
            completions = serialize_completions(group.completions, group.scores)
            place = {"index": group.index, "step": group.step}
            values.append({**place, "completions": completions})
    return values, tensors


def restore_experience(
    experience: Experience, values: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> None:
    """Restore what ``serialize_experience`` returned, as far as the run still uses it."""
    if experience.curriculum is not None and "posterior" in tensors:
        experience.curriculum.posterior = tensors["posterior"].numpy().copy()
    if experience.replay is None or "tokens" not in tensors:
        return
    lengths = [c["tokens"] for group in values for c in group["completions"]]
    parts = zip(tensors["tokens"].split(lengths), tensors["logprobs"].split(lengths), strict=True)
    groups = []
    for group in values:
        restored = [restore_completion(c, *next(parts), None) for c in group["completions"]]
        completions, scores = zip(*restored, strict=True)
        groups.append(KeptGroup(group["index"], group["step"], completions, scores))
    experience.replay.groups = groups[-experience.replay.settings.size :]
