"""Token log-probabilities from hidden states, without a tokens × vocabulary tensor.

The language-model head and its softmax run over chunks of tokens. With a frozen head the
gradient of each log-probability with respect to its hidden state,

    d log p(y) / d h = (W[y] - sum_v p(v) W[v]) / temperature,

is computed in the same pass as the log-probability itself: one matrix product more, and nothing
to recompute in backward. A head that is trained, or that carries an adapter, is recomputed chunk
by chunk in backward instead, for its weights' gradient needs the loss's coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from vlm_grpo.engine.linear import Linear, product
from vlm_grpo.engine.sampling import SamplingDistribution


@dataclass(frozen=True)
class TokenScores:
    """Per-token results for the M completion tokens of a batch, in the batch's order.

    Attributes:
        logprobs: log-probability of each token under the restricted distribution, nats, (M,).
        entropies: entropy of that distribution, nats, (M,); None unless asked for.
    """

    logprobs: Tensor
    entropies: Tensor | None = None


def score_tokens(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    positions: Tensor,
    distribution: SamplingDistribution,
    chunk_tokens: int,
    with_entropy: bool = False,
) -> TokenScores:
    """Score target tokens from the hidden states that predict them.

    Args:
        head: the language-model head, a linear map to the vocabulary.
        hidden: (M, width) final hidden states at the predicting positions.
        targets: (M,) tokens.
        positions: (M,) index of each token within its completion.
        restriction: the distribution under which tokens are scored.
        chunk_tokens: tokens whose logits are held at once; 0: all.
        with_entropy: also return entropies, with gradient.
    """
    rows = chunk_tokens or max(1, len(targets))
    frozen = type(head) in (nn.Linear, Linear) and not head.weight.requires_grad  # type: ignore[union-attr]
    one_pass = frozen and not with_entropy and hidden.requires_grad and torch.is_grad_enabled()
    parts: list[tuple[Tensor, Tensor | None]] = []
    for h, y, t in zip(hidden.split(rows), targets.split(rows), positions.split(rows), strict=True):
        chunk = (head, h, y, t, distribution, with_entropy)
        if one_pass:
            parts.append((_FrozenHead.apply(h, head.weight, y, t, distribution), None))  # type: ignore[arg-type]
        elif torch.is_grad_enabled():
            parts.append(checkpoint(_score_chunk, *chunk, use_reentrant=False))  # type: ignore[arg-type]
        else:
            parts.append(_score_chunk(*chunk))
    logprobs = torch.cat([part[0] for part in parts])
    if not with_entropy:
        return TokenScores(logprobs)
    return TokenScores(logprobs, torch.cat([part[1] for part in parts]))  # type: ignore[arg-type]


def _score_chunk(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    positions: Tensor,
    distribution: SamplingDistribution,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    scores = score_logits(head(hidden), targets, positions, distribution, with_entropy)
    return scores.logprobs, scores.entropies


def score_logits(
    logits: Tensor,
    targets: Tensor,
    positions: Tensor,
    distribution: SamplingDistribution,
    with_entropy: bool = False,
) -> TokenScores:
    """Score target tokens from the logits (M, vocabulary) that predict them."""
    logprobs = distribution(logits, positions).log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    if not with_entropy:
        return TokenScores(chosen)
    # Banned tokens have probability 0 and log-probability -inf, whose product is no number.
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0)
    return TokenScores(chosen, -(logprobs.exp() * finite).sum(-1))


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities and, saved for backward, their gradients at the hidden states."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        positions: Tensor,
        distribution: SamplingDistribution,
    ) -> Tensor:
        logits = distribution(product(hidden, weight), positions)
        probs = logits.softmax(-1)
        # Taken from the logits: the log of a small probability would have lost digits.
        chosen = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        gradient = weight[targets].sub_(product(probs.to(weight.dtype), weight.T))
        ctx.save_for_backward(gradient.div_(distribution.temperature or 1.0))
        return chosen

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (gradient * grad_outputs[0][:, None].to(gradient.dtype), None, None, None, None)
