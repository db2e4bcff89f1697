"""Scoring completions behind one copy of their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.engine.attention import GroupSpan, PackedAttention
from vlm_grpo.engine.batch import MicroBatch
from vlm_grpo.engine.decode import PrefixInputs
from vlm_grpo.engine.logprobs import TokenScores, score_tokens
from vlm_grpo.engine.sampling import SamplingDistribution
from vlm_grpo.families import Family


def score_shared(
    family: Family,
    model: Any,
    batch: MicroBatch,
    prefixes: Sequence[PrefixInputs],
    distribution: SamplingDistribution,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> TokenScores:
    """Log-probabilities of a micro-batch's completion tokens, in one packed row.

    The row is ``[prompt | c1 | … | cG]`` for each slice, one after the other. Every completion
    starts at the prompt's largest position + 1, and the prompt's last hidden state predicts the
    first token of each.

    Args:
        batch: the completions.
        prefixes: the inputs of each slice's prompt.
        restriction: the distribution under which tokens are scored.
        chunk_tokens: tokens whose logits are held at once; 0: all.
        with_entropy: also return entropies.
    """
    row = PackedRow(batch, prefixes)
    features = [image for prefix in prefixes for image in prefix.features]
    hidden = family.language_model(model)(
        **family.language_inputs(model, row.tokens[None], features),
        position_ids=row.positions[:, None],
        attend=PackedAttention(row.spans),
        use_cache=False,
    ).last_hidden_state[0]
    head: Any = model.get_output_embeddings()
    predicting = hidden[row.predictors]
    return score_tokens(
        head, predicting, row.targets, row.steps, distribution, chunk_tokens, with_entropy
    )


class PackedRow:
    """The row's tokens and positions, and which hidden state predicts which target."""

    def __init__(self, batch: MicroBatch, prefixes: Sequence[PrefixInputs]) -> None:
        device = prefixes[0].token_ids.device
        tokens: list[Tensor] = []
        positions: list[Tensor] = []
        self.spans: list[GroupSpan] = []
        predictors: list[Tensor] = []
        steps: list[Tensor] = []
        start = 0
        for piece, prefix in zip(batch.slices, prefixes, strict=True):
            length = len(prefix.token_ids)
            fed = tuple(len(completion) - 1 for completion in piece.completions)
            self.spans.append(GroupSpan(start, length, fed))
            tokens.append(prefix.token_ids)
            positions.append(prefix.positions)
            at = start + length
            for completion, count in zip(piece.completions, fed, strict=True):
                order = torch.arange(count + 1, device=device)
                tokens.append(torch.tensor(completion[:-1], dtype=torch.int64, device=device))
                positions.append((prefix.next_position + order[:-1]).expand(3, -1))
                predictors.append((at - 1 + order).where(order > 0, start + length - 1))
                steps.append(order)
                at += count
            start = at
        self.tokens = torch.cat(tokens)
        self.positions = torch.cat(positions, dim=1)
        self.predictors = torch.cat(predictors)
        self.steps = torch.cat(steps)
        self.targets = torch.tensor(
            [token for completion in batch.completions for token in completion], device=device
        )
