"""Scoring of completions behind one shared copy of their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from vlm_grpo.engine.attention import PackedAttention
from vlm_grpo.engine.batch import MicroBatch
from vlm_grpo.engine.decode import PrefixInputs
from vlm_grpo.engine.logprobs import ScoringSettings, TokenScores, score_tokens
from vlm_grpo.engine.varlen import GroupSpan
from vlm_grpo.families import Family
from vlm_grpo.families.transfer import copy_to


def score_shared(
    family: Family,
    model: Any,
    batch: MicroBatch,
    prefixes: Sequence[PrefixInputs],
    settings: ScoringSettings,
) -> TokenScores:
    """Score a micro-batch's completion tokens in one packed row.

    Args:
        family: the model's family.
        model: the bare transformers model.
        batch: the micro-batch.
        prefixes: the inputs of each slice's prompt.
        settings: how the tokens are scored.
    """
    row = pack_row(batch, prefixes)
    head: Any = model.get_output_embeddings()
    device = head.weight.device
    features = [image for prefix in prefixes for image in prefix.features]
    hidden = family.language_model(model)(
        **family.language_inputs(model, row.token_ids[None], features, device),
        position_ids=copy_to(device, row.position_ids[:, None]),
        attend=PackedAttention(row.spans),
        use_cache=False,
    ).last_hidden_state[0]
    predictors, targets, positions = (
        copy_to(device, values) for values in (row.predictors, row.targets, row.target_positions)
    )
    return score_tokens(head, hidden[predictors], targets, positions, settings)


@dataclass(frozen=True)
class PackedRow:
    """A row of T tokens, ``[prompt | c1 | … | cG]`` for each slice, that predicts M target tokens.

    Attributes:
        token_ids: prompts, and each completion without its last token, which is never fed.
        position_ids: rotary positions; each completion starts at its prompt's largest + 1.
        spans: the location of each group.
        predictors: index in the row of the hidden state that predicts each target; the prompt's
            last one predicts the first token of each completion.
        targets: all tokens of the completions.
        target_positions: index of each target within its completion.
    """

    token_ids: Int[np.ndarray, " T"]
    position_ids: Int[np.ndarray, "3 T"]
    spans: tuple[GroupSpan, ...]
    predictors: Int[np.ndarray, " M"]
    targets: Int[np.ndarray, " M"]
    target_positions: Int[np.ndarray, " M"]


def pack_row(batch: MicroBatch, prefixes: Sequence[PrefixInputs]) -> PackedRow:
    """Pack a micro-batch's slices into one row; ``prefixes`` are the inputs of their prompts."""
    token_ids: list[Any] = []
    position_ids: list[np.ndarray] = []
    spans: list[GroupSpan] = []
    predictors: list[np.ndarray] = []
    target_positions: list[np.ndarray] = []
    start = 0
    for piece, prefix in zip(batch.slices, prefixes, strict=True):
        length = len(prefix.token_ids)
        fed = tuple(len(completion) - 1 for completion in piece.completions)
        spans.append(GroupSpan(start, length, fed))
        token_ids.append(prefix.token_ids)
        position_ids.append(prefix.position_ids)
        next_position, last = prefix.next_position, start + length - 1
        start += length
        for completion, count in zip(piece.completions, fed, strict=True):
            order = np.arange(count + 1)
            token_ids.append(completion[:-1])
            position_ids.append(np.broadcast_to(next_position + order[:-1], (3, count)))
            predictors.append(np.where(order > 0, start - 1 + order, last))
            target_positions.append(order)
            start += count
    targets = [token for completion in batch.completions for token in completion]
    return PackedRow(
        np.concatenate(token_ids).astype(np.int64),
        np.concatenate(position_ids, axis=1),
        tuple(spans),
        np.concatenate(predictors),
        np.array(targets),
        np.concatenate(target_positions),
    )
