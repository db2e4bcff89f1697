"""Token log-probabilities from hidden states, without a tokens × vocabulary tensor.

The language-model head and its softmax run over chunks of tokens. With a frozen head, the
gradient of each log-probability with respect to its hidden state,

    d log p(y) / d h = (W[y] - sum_v p(v) W[v]) / temperature,

is computed in the same pass as the log-probability: one more matrix product, and no recomputation
in backward. A trained head, or one with an adapter, is recomputed chunk by chunk in backward,
because its weights' gradient needs the loss's coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from vlm_grpo.engine.linear import Linear, product
from vlm_grpo.engine.sampling import SamplingDistribution


@dataclass(frozen=True)
class ScoringSettings:
    """Settings of the scoring of tokens.

    Attributes:
        distribution: the distribution under which tokens are scored.
        chunk_tokens: number of tokens whose logits are computed at once; 0: all.
        with_entropy: also compute entropies, with gradient.
    """

    distribution: SamplingDistribution
    chunk_tokens: int = 0
    with_entropy: bool = False


@dataclass(frozen=True)
class TokenScores:
    """Scores of the M completion tokens of a batch, in the batch's order.

    Attributes:
        logprobs: log-probability of each token under the sampling distribution, in nats.
        entropies: entropy of that distribution at each token, in nats; None if not requested.
    """

    logprobs: Float[Tensor, " M"]
    entropies: Float[Tensor, " M"] | None = None


def score_tokens(
    head: nn.Module,
    hidden: Float[Tensor, "M width"],
    targets: Int[Tensor, " M"],
    positions: Int[Tensor, " M"],
    settings: ScoringSettings,
) -> TokenScores:
    """Score target tokens from the hidden states that predict them.

    Args:
        head: the language-model head, a linear map to the vocabulary.
        hidden: final hidden states at the predicting positions.
        targets: token ids.
        positions: index of each token within its completion.
        settings: how the tokens are scored.
    """
    rows = settings.chunk_tokens or len(targets)
    frozen = type(head) in (nn.Linear, Linear) and not head.weight.requires_grad  # type: ignore[union-attr]
    with_gradient = hidden.requires_grad and torch.is_grad_enabled()
    one_pass = frozen and with_gradient and not settings.with_entropy
    parts: list[tuple[Tensor, Tensor | None]] = []
    for h, y, t in zip(hidden.split(rows), targets.split(rows), positions.split(rows), strict=True):
        if one_pass:
            logprobs = _FrozenHead.apply(h, head.weight, y, t, settings.distribution)  # type: ignore[arg-type]
            parts.append((logprobs, None))
        elif torch.is_grad_enabled():
            parts.append(checkpoint(_score_chunk, head, h, y, t, settings, use_reentrant=False))  # type: ignore[arg-type]
        else:
            parts.append(_score_chunk(head, h, y, t, settings))
    logprobs = torch.cat([part[0] for part in parts])
    if not settings.with_entropy:
        return TokenScores(logprobs)
    return TokenScores(logprobs, torch.cat([part[1] for part in parts]))  # type: ignore[arg-type]


def _score_chunk(
    head: nn.Module, hidden: Tensor, targets: Tensor, positions: Tensor, settings: ScoringSettings
) -> tuple[Tensor, Tensor | None]:
    scores = score_logits(
        head(hidden), targets, positions, settings.distribution, settings.with_entropy
    )
    return scores.logprobs, scores.entropies


def score_logits(
    logits: Float[Tensor, "M vocabulary"],
    targets: Int[Tensor, " M"],
    positions: Int[Tensor, " M"],
    distribution: SamplingDistribution,
    with_entropy: bool = False,
) -> TokenScores:
    """Score target tokens from the logits that predict them."""
    logprobs = distribution(logits, positions).log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    if not with_entropy:
        return TokenScores(chosen)
    # Banned tokens have probability 0 and log-probability -inf: their product would be NaN.
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0)
    return TokenScores(chosen, -(logprobs.exp() * finite).sum(-1))


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities, with their gradients at the hidden states saved for backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Float[Tensor, "m width"],
        weight: Float[Tensor, "vocabulary width"],
        targets: Int[Tensor, " m"],
        positions: Int[Tensor, " m"],
        distribution: SamplingDistribution,
    ) -> Float[Tensor, " m"]:
        logits = distribution(product(hidden, weight), positions)
        probs = logits.softmax(-1)
        # Computed from the logits: the log of a small probability would lose digits.
        chosen = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        gradient = weight[targets].sub_(product(probs.to(weight.dtype), weight.T))
        ctx.save_for_backward(gradient.div_(distribution.temperature or 1.0))
        return chosen

    @staticmethod
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (gradient * grad_outputs[0][:, None].to(gradient.dtype), None, None, None, None)
