"""Factors of tokens in the policy loss, by their entropy and by their dependency on the image.

PAPO (arXiv:2507.06448) raises the KL of the policy to itself behind masked images; VPPO
(arXiv:2510.09285) trains the tokens and completions most that depend on their images most. Both
need one more pass without gradient, behind the masked images.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.media.image_noise import PatchMask
from vlm_grpo.model.engine.batch import GroupSlice
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.training.batch import Rollout, copy_to_host, is_masked
from vlm_grpo.training.objective import image_dependency
from vlm_grpo.types import Completion


def mask_images(
    slices: Sequence[GroupSlice], prompts: PromptBuilder, settings: Settings, step: int
) -> list[GroupSlice]:
    """Return the groups that have images, behind masked copies of these.

    Args:
        slices: the completions of a step, by group.
        prompts: builds the model's prompts.
        settings: the run's settings, with those of the mask.
        step: number of steps before this one.
    """
    perception, masked = settings.objective.perception, []
    assert perception is not None
    for piece in slices:
        example = piece.prompt.example
        if example.images:
            seed = settings.seed, step, zlib.crc32(example.id.encode())
            mask = PatchMask(perception.mask_ratio, perception.patch_size, seed)
            prompt = prompts.encode_text(example.with_noise(mask), piece.prompt.text)
            masked.append(replace(piece, prompt=prompt))
    return masked


def find_token_factors(
    rollout: Rollout, masked: Mapping[int, Tensor], objective: ObjectiveSettings
) -> dict[int, Tensor] | None:
    """Return the (T,) factors of the tokens' policy losses by completion; None if all are 1.

    All ranks must call it.

    Args:
        rollout: this rank's completions.
        masked: log-probs behind masked images by completion.
        objective: settings of the objective.
    """
    perception, selects = objective.perception, objective.top_entropy_quantile < 1
    weighs = perception is not None and perception.weighs_tokens
    if not weighs and not selects:
        return None
    pairs = [(group, c) for group in rollout.groups for c in group.completions]
    found = [torch.ones(len(c.token_ids)) for _, c in pairs]
    if perception is not None and weighs:
        sampled = [torch.tensor(completion.logprobs) for _, completion in pairs]
        has_image = [bool(group.prompt.example.images) for group, _ in pairs]
        behind = {row: masked[row] for row, has in enumerate(has_image) if has}
        weights = weigh_by_dependency(sampled, behind, perception)
        found = [factor * weights[row] for row, factor in enumerate(found)]
    if selects:
        active = [replace(c, entropies=()) if is_masked(c, objective) else c for _, c in pairs]
        kept = select_high_entropy(active, objective.top_entropy_quantile)
        found = [factor * kept[row] for row, factor in enumerate(found)]
    return dict(enumerate(found))


def select_high_entropy(completions: Sequence[Completion], share: float) -> dict[int, Tensor]:
    """Return the (T,) factors of the tokens by completion: 1 for the share of the tokens of the
    step with the highest entropy, 0 for the others (arXiv:2506.01939, section 5).

    The threshold is the quantile 1 − share over all ranks, as in TRL. All ranks must call it.

    Args:
        completions: the completions, with the entropy of each token when it was sampled; those
            without are left out, and have factors of 1.
        share: share of the tokens, above 0 and below 1.
    """
    every = gather_object([value for c in completions for value in c.entropies])
    threshold = float(np.quantile(every, 1 - share)) if every else 0.0
    return {
        row: (torch.tensor(completion.entropies) >= threshold).float()
        if completion.entropies
        else torch.ones(len(completion.token_ids))
        for row, completion in enumerate(completions)
    }


def weigh_by_dependency(
    sampled: Sequence[Tensor], masked: Mapping[int, Tensor], settings: PerceptionSettings
) -> dict[int, Tensor]:
    """Return the (T,) factors of the tokens' policy losses by completion, as VPPO sets them.

    A factor is 0 for tokens whose dependency is not among the ``top_share`` of their completion,
    and otherwise min_scale + (1 − min_scale)·s / mean(s), where s is the completion's mean
    dependency, mapped to 0 to 1 over all completions with images, on all ranks, whose mean factor
    is then 1. All ranks must call it.

    Args:
        sampled: (T,) log-probs of each completion's tokens when sampled.
        masked: those behind masked images, by completion; others have factors of 1.
        settings: the share and the scale.
    """
    dependency = {
        row: image_dependency(sampled[row].to(values), values)
        for row, values in copy_to_host(masked).items()
    }
    means = {row: values.mean().item() for row, values in dependency.items()}
    every = gather_object([*means.values()])
    low, high = min(every, default=0.0), max(every, default=0.0)
    spread = high - low
    mean = sum(value - low for value in every) / max(len(every), 1)
    factors = {row: torch.ones(len(values)) for row, values in enumerate(sampled)}
    for row, values in dependency.items():
        if settings.top_share is not None:
            count = math.ceil(len(values) * settings.top_share)
            factors[row] = torch.zeros(len(values))
            factors[row][values.topk(count).indices] = 1.0
        if settings.min_scale is not None and spread > 1e-6:
            share = (means[row] - low) / mean
            factors[row] = factors[row] * (settings.min_scale + (1 - settings.min_scale) * share)
    return factors
