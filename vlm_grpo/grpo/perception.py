"""How much the tokens of completions depend on their images, and the weights that follow from it.

PAPO (arXiv:2507.06448) raises the KL of the policy to itself behind masked images; VPPO
(arXiv:2510.09285) trains the tokens and completions most that depend on their images most. Both
need one more pass without gradient, behind the masked images.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.distributed.collectives import gather_object
from vlm_grpo.engine.batch import GroupSlice
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.objective import image_dependency
from vlm_grpo.utils.image_mask import PatchMask


def mask_images(
    slices: Sequence[GroupSlice],
    prompts: PromptBuilder,
    settings: PerceptionSettings,
    seed: tuple[int, ...],
) -> list[GroupSlice]:
    """Return the groups that have images, behind masked copies of these.

    Args:
        slices: the completions of a step, by group.
        prompts: builds the model's prompts.
        settings: the mask.
        seed: seed of the run and number of the step; the example's id is added to it.
    """
    masked = []
    for piece in slices:
        example = piece.prompt.example
        if example.images:
            number = zlib.crc32(example.id.encode())
            mask = PatchMask(settings.mask_ratio, settings.patch_size, (*seed, number))
            prompt = prompts.encode_text(example.with_noise(mask), piece.prompt.text)
            masked.append(replace(piece, prompt=prompt))
    return masked


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
        row: image_dependency(sampled[row].to(values), values).cpu()
        for row, values in masked.items()
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
