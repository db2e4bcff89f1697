"""Packed rows: each prompt followed by its completions, scored in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.model.engine.attention import PackedAttention
from vlm_grpo.model.engine.varlen import GroupSpan
from vlm_grpo.model.families import Family, ImageFeatures, PromptLayout
from vlm_grpo.model.transfer import copy_to


@dataclass(frozen=True)
class PrefixInputs:
    """A prompt, ready to be run: tokens, their positions and masks, features of its images."""

    token_ids: Int[np.ndarray, " T"]
    layout: PromptLayout
    features: tuple[ImageFeatures, ...]

    @property
    def next_position(self) -> int:
        """First position of the completions: that of the prompt's last token + 1."""
        # The times of a clip before it can be larger positions.
        return int(self.layout.positions[:, -1].max()) + 1


def run_row(
    family: Family,
    model: Any,
    row: PackedRow,
    prefixes: Sequence[PrefixInputs],
    attend: PackedAttention,
) -> Float[Tensor, "T width"]:
    device = model.get_output_embeddings().weight.device
    features = [images for prefix in prefixes for images in prefix.features]
    positions = copy_to(device, row.position_ids[:, None])
    return family.run(model, row.token_ids[None], positions, features, attend)[0]


@dataclass(frozen=True)
class PackedRow:
    """A row of T tokens, ``[prompt | c1 | … | cG]`` for each slice, that predicts M targets."""

    token_ids: Int[np.ndarray, " T"]
    """Prompts, and each completion without its last token, which is never fed."""
    position_ids: Int[np.ndarray, "axes T"]
    """Rotary positions; each completion starts at its prompt's last + 1."""
    spans: tuple[GroupSpan, ...]
    predictors: Int[np.ndarray, " M"]
    """Index in the row of the hidden state that predicts each target: the prompt's last one for the
    first token of each completion."""
    targets: Int[np.ndarray, " M"]
    target_positions: Int[np.ndarray, " M"]
    """Index of each target within its completion."""


def pack_row(
    prefixes: Sequence[PrefixInputs], completions: Sequence[Sequence[Sequence[int]]]
) -> PackedRow:
    axes = max(len(prefix.layout.positions) for prefix in prefixes)
    token_ids: list[Any] = []
    position_ids: list[np.ndarray] = []
    spans: list[GroupSpan] = []
    predictors, target_positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    start = 0
    for prefix, group in zip(prefixes, completions, strict=True):
        length = len(prefix.token_ids)
        fed = tuple(len(completion) - 1 for completion in group)
        spans.append(GroupSpan(start, length, fed))
        token_ids.append(prefix.token_ids)
        position_ids.append(np.broadcast_to(prefix.layout.positions, (axes, length)))
        next_position, last = prefix.next_position, start + length - 1
        start += length
        for completion, count in zip(group, fed, strict=True):
            order = np.arange(count + 1)
            token_ids.append(completion[:-1])
            position_ids.append(np.broadcast_to(next_position + order[:-1], (axes, count)))
            predictors.append(np.where(order > 0, start - 1 + order, last))
            target_positions.append(order)
            start += count
    targets = [token for group in completions for completion in group for token in completion]
    return PackedRow(
        np.concatenate(token_ids).astype(np.int64),
        np.concatenate(position_ids, axis=1),
        tuple(spans),
        np.concatenate(predictors),
        np.array(targets, dtype=np.int64),
        np.concatenate(target_positions),
    )
