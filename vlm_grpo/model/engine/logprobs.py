"""Token log-probabilities from hidden states, without a tokens × vocabulary tensor.

The language-model head and its softmax run over chunks of tokens. With a frozen head, the
gradient of each log-probability with respect to its hidden state,

    d log p(y) / d h = (W[y] - sum_v p(v) W[v]) / temperature,

is computed in the same pass as the log-probability: one more matrix product, and no recomputation
in backward. A trained head, or one with an adapter, is recomputed chunk by chunk in backward,
because its weights' gradient needs the loss's coefficients. All chunks add to one gradient of the
head's weights, a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.utils.checkpoint import checkpoint

from vlm_grpo.model.engine.linear import is_plain, outer, product
from vlm_grpo.model.engine.sampling import SamplingDistribution

MAX_GRADIENTS = 2**22
"""Number of the head's gradients that are computed at once, before they are added to the others."""


@dataclass(frozen=True)
class ScoringSettings:
    """How tokens are scored."""

    distribution: SamplingDistribution
    chunk_tokens: int = 0  # number of tokens whose logits are computed at once; 0: all
    with_entropy: bool = False  # also compute entropies, with gradient
    with_top: bool = False  # also find out which tokens are the likeliest at their places
    top_k: int = 0  # number of the likeliest tokens at each place to score, too; 0: none
    others: Tensor | None = None  # (M, k) other tokens at each place to score, too


@dataclass(frozen=True)
class TokenScores:
    """Scores of the M completion tokens of a batch, in the batch's order; log-probabilities and
    entropies in nats. None: not requested."""

    logprobs: Float[Tensor, " M"]  # of each token under the sampling distribution
    entropies: Float[Tensor, " M"] | None = None  # of that distribution at each token
    others: Float[Tensor, "M k"] | None = None  # log-probabilities of k further tokens there
    is_top: Bool[Tensor, " M"] | None = None  # whether each token is the likeliest at its place
    # the tokens of ``others``, if they are the likeliest; else None
    likeliest: Int[Tensor, "M k"] | None = None

    @property
    def columns(self) -> tuple[Tensor | None, ...]:
        """The values as a tuple, in which autograd and FSDP2 find the tensors."""
        return self.logprobs, self.entropies, self.others, self.is_top, self.likeliest

    @classmethod
    def join(cls, parts: Sequence[TokenScores]) -> TokenScores:
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def take(self, index: Int[Tensor, " tokens"]) -> TokenScores:
        return TokenScores(*(None if column is None else column[index] for column in self.columns))  # type: ignore[arg-type]


def score_tokens(
    head: nn.Module,
    hidden: Float[Tensor, "M width"],
    targets: Int[Tensor, "M ..."],
    positions: Int[Tensor, " M"],
    settings: ScoringSettings,
) -> TokenScores:
    """Score target tokens, by their indices within completions, from the final hidden states that
    predict them. The head is a linear map to the vocabulary. Targets (M, 1 + k) are followed by the
    other tokens at their places to score."""
    rows = settings.chunk_tokens or len(targets)
    weight: Any = head.weight
    has_weight_only = is_plain(head) and head.bias is None
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    one_pass = has_weight_only and not weight.requires_grad and not settings.with_entropy
    one_pass = one_pass and targets.ndim == 1
    if has_weight_only and with_gradient and not one_pass:
        return TokenScores(*_RecomputedHead.apply(settings, hidden, weight, targets, positions))  # type: ignore[misc]

    def score(hidden: Tensor, targets: Tensor, positions: Tensor) -> TokenScores:
        return score_logits(head(hidden), targets, positions, settings)

    parts: list[TokenScores] = []
    for h, y, t in zip(hidden.split(rows), targets.split(rows), positions.split(rows), strict=True):
        if one_pass and with_gradient:
            logprobs, is_top = _FrozenHead.apply(settings, h, weight, y, t)  # type: ignore[misc]
            parts.append(TokenScores(logprobs, is_top=is_top))
        elif torch.is_grad_enabled():
            parts.append(checkpoint(score, h, y, t, use_reentrant=False))  # type: ignore[arg-type]
        else:
            parts.append(score(h, y, t))
    return TokenScores.join(parts)


def add_tokens(targets: Int[Tensor, " M"], others: Int[Tensor, "M k"] | None) -> Tensor:
    """Return the target tokens, followed by the other tokens at their places to score."""
    return targets if others is None else torch.cat([targets[:, None], others], dim=1)


def score_logits(
    logits: Float[Tensor, "M vocabulary"],
    targets: Int[Tensor, "M ..."],
    positions: Int[Tensor, " M"],
    settings: ScoringSettings,
) -> TokenScores:
    logprobs = settings.distribution(logits, positions).log_softmax(-1)
    every = targets.view(len(targets), -1)
    found = logprobs.gather(1, every)
    chosen, others, likeliest = found[:, 0], found[:, 1:] if targets.ndim == 2 else None, None
    if settings.top_k:
        others, likeliest = logprobs.topk(min(settings.top_k, logits.shape[1]))
    entropies = is_top = None
    if settings.with_entropy:
        # Banned tokens have probability 0 and log-probability -inf: their product would be NaN.
        finite = logprobs.masked_fill(logprobs == -torch.inf, 0)
        entropies = -(logprobs.exp() * finite).sum(-1)
    if settings.with_top:
        is_top = logprobs.argmax(-1) == every[:, 0]
    return TokenScores(chosen, entropies, others, is_top, likeliest)


class _FrozenHead(torch.autograd.Function):
    """Log-probabilities, with their gradients at the hidden states saved for backward."""

    @staticmethod
    def forward(
        ctx: Any, settings: ScoringSettings, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        hidden, weight, targets, positions = tensors
        logits = settings.distribution(product(hidden, weight), positions)
        probs = logits.softmax(-1)
        # Computed from the logits: the log of a small probability would lose digits.
        chosen = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        gradient = weight[targets].sub_(product(probs.to(weight.dtype), weight.T))
        ctx.save_for_backward(gradient.div_(settings.distribution.temperature or 1.0))
        if not settings.with_top:
            return chosen, None
        is_top = logits.argmax(-1) == targets
        ctx.mark_non_differentiable(is_top)
        return chosen, is_top

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * grad_outputs[0][:, None].to(gradient.dtype), None, None, None


class _RecomputedHead(torch.autograd.Function):
    """Scores of all chunks; backward recomputes their logits, and adds to one weight gradient."""

    @staticmethod
    def forward(ctx: Any, settings: ScoringSettings, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, positions = tensors
        kind = hidden.device.type
        ctx.settings = settings
        ctx.is_autocast = is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ctx.dtype = torch.get_autocast_dtype(kind) if ctx.is_autocast else weight.dtype
        ctx.save_for_backward(*tensors)
        rows, cast = settings.chunk_tokens or len(targets), weight.to(ctx.dtype)
        parts = [
            score_logits(product(h.to(ctx.dtype), cast), y, t, settings)
            for h, y, t in zip(*(x.split(rows) for x in (hidden, targets, positions)), strict=True)
        ]
        scores = TokenScores.join(parts)
        if scores.is_top is not None:
            ctx.mark_non_differentiable(scores.is_top)
        return scores.columns

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, positions = ctx.saved_tensors
        settings = replace(ctx.settings, with_top=False)
        rows, cast = settings.chunk_tokens or len(targets), weight.detach().to(ctx.dtype)
        d_hidden, d_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[2]:
            wide = torch.promote_types(weight.dtype, torch.float32)
            d_weight = torch.zeros_like(weight, dtype=wide)
        for start in reversed(range(0, len(targets), rows)):
            chunk = slice(start, start + rows)
            h = hidden[chunk].to(ctx.dtype)
            kind = h.device.type
            autocast = torch.autocast(kind, ctx.dtype) if ctx.is_autocast else nullcontext()
            with torch.enable_grad(), autocast:
                logits = product(h, cast).requires_grad_()
                scores = score_logits(logits, targets[chunk], positions[chunk], settings)
            pairs = zip(scores.columns, grad_outputs, strict=True)
            used = [(s, grad[chunk]) for s, grad in pairs if s is not None and grad is not None]
            outputs, grads = zip(*used, strict=True)
            (d_logits,) = torch.autograd.grad(outputs, logits, grads)
            del logits, scores, outputs
            d_hidden[chunk] = product(d_logits, cast.T)
            if d_weight is not None:
                count = max(1, MAX_GRADIENTS // weight.shape[1])
                for total, part in zip(
                    d_weight.split(count), d_logits.split(count, dim=1), strict=True
                ):
                    total += outer(part, h) if h.dtype == torch.float32 else part.T @ h
        return None, d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None
