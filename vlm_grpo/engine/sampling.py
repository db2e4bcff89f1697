"""The sampling distribution: one definition for the sampler and for the scorer.

A log-probability means something only relative to a distribution. ``SamplingDistribution`` says
which
tokens that distribution leaves out and at which temperature it is taken; the rollout draws from
it and the update scores under it, so that the importance ratio of a fresh completion is 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm_grpo.config.policy import RolloutSettings
from vlm_grpo.families import Family


@dataclass(frozen=True)
class SamplingDistribution:
    """What both sampler and scorer do to the logits.

    Attributes:
        temperature: logits are divided by it; 0 means greedy (scored as 1).
        banned: tokens that never appear (image, video and vision markers).
        eos: end-of-sequence tokens, banned too in the first ``min_new_tokens`` positions.
        min_new_tokens: how many tokens a completion has at the least.
    """

    temperature: float = 1.0
    banned: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """The restricted logits in float32 (float64 stays), banned ones at -inf; a new tensor.

        Args:
            logits: (n, vocabulary).
            positions: (n,) index of each token within its completion.
        """
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        restricted = wide / (self.temperature or 1.0)
        if self.banned:
            restricted[:, list(self.banned)] = -torch.inf
        if self.min_new_tokens and self.eos:
            early = (positions < self.min_new_tokens)[:, None]
            columns = restricted[:, list(self.eos)]
            restricted[:, list(self.eos)] = columns.masked_fill(early, -torch.inf)
        return restricted


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are drawn.

    Attributes:
        restriction: the distribution that is scored.
        max_completion_length: the most tokens of a completion, end-of-sequence included.
        stop: strings that end a completion once its text holds one of them.
        top_k: keep only the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this mass; 1.0 keeps all.
        min_p: drop tokens below this share of the likeliest one; 0.0 keeps all.
    """

    distribution: SamplingDistribution
    max_completion_length: int
    stop: tuple[str, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.distribution.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether the sampler draws from fewer tokens than are scored."""
        return bool(self.top_k or self.min_p or self.top_p < 1)


def build_sampling_distribution(
    model: Any, family: Family, rollout: RolloutSettings
) -> SamplingDistribution:
    """The model's banned and end tokens with the recipe's temperature."""
    eos = model.generation_config.eos_token_id
    eos = model.config.get_text_config().eos_token_id if eos is None else eos
    return SamplingDistribution(
        temperature=rollout.temperature,
        banned=family.banned_token_ids(model.config),
        eos=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        min_new_tokens=rollout.min_new_tokens,
    )


def build_sampling_settings(
    distribution: SamplingDistribution, rollout: RolloutSettings
) -> SamplingSettings:
    """How the recipe's rollout draws completions under ``distribution``."""
    return SamplingSettings(
        distribution,
        rollout.max_completion_length,
        rollout.stop,
        rollout.top_k,
        rollout.top_p,
        rollout.min_p or 0.0,
    )


def draw_uniforms(seed: Sequence[int | str], length: int) -> np.ndarray:
    """The ``length`` uniform numbers in [0, 1) that a completion's tokens are drawn with.

    Each completion has a stream of its own, named by its seed (run, step, example, index in the
    group), so what is sampled does not depend on the batch it was sampled in, on the number of
    ranks, or on any generator's state.
    """
    digest = hashlib.blake2b(repr(tuple(seed)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(
        length
    )


class SamplerState:
    """Tokens of n completions as they are drawn, with their log-probabilities and entropies.

    Args:
        uniform: (n, longest) the uniform numbers to draw with; see ``draw_uniforms``.
        settings: how completions are drawn.
        has_stop_string: whether a completion's tokens hold a stop string; asked after each token
            where ``settings.stop`` is set.

    Attributes:
        tokens: (n, longest) int64, filled up to ``lengths``.
        logprobs: log-probability of each token under the very distribution it was drawn from.
        entropies: of the restricted distribution, before any truncation.
        lengths: (n,) tokens drawn.
        active: (n,) whether the completion goes on.
    """

    def __init__(
        self,
        uniform: Tensor,
        settings: SamplingSettings,
        has_stop_string: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        device = uniform.device
        self.uniform, self.settings, self.has_stop_string = uniform, settings, has_stop_string
        self.tokens = torch.zeros(uniform.shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(uniform.shape, device=device)
        self.entropies = torch.zeros(uniform.shape, device=device)
        self.lengths = torch.zeros(len(uniform), dtype=torch.int64, device=device)
        self.active = torch.ones(len(uniform), dtype=torch.bool, device=device)
        self._eos = torch.tensor(settings.distribution.eos, dtype=torch.int64, device=device)

    def sample(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Draw the next token of each of ``rows``, note it, and end the rows that are done.

        Args:
            logits: (n, vocabulary), the model's own.
            rows: (n,) completions, all active.

        Returns:
            The tokens, (n,).
        """
        positions = self.lengths[rows]
        restricted = self.settings.distribution(logits, positions)
        logprobs = restricted.log_softmax(-1)
        probs = logprobs.exp()
        # A banned token has probability 0 and log-probability -inf; 0 times a finite number is 0.
        entropies = -(probs * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)
        if self.settings.greedy:
            tokens = restricted.argmax(-1)
        elif self.settings.truncates:
            kept = _truncated(probs, self.settings)
            logprobs = (kept / kept.sum(-1, keepdim=True)).log()
            tokens = _invert(kept, self.uniform[rows, positions])
        else:
            tokens = _invert(probs, self.uniform[rows, positions])
        self.tokens[rows, positions] = tokens
        self.logprobs[rows, positions] = logprobs.gather(1, tokens[:, None])[:, 0].float()
        self.entropies[rows, positions] = entropies.float()
        self.lengths[rows] += 1
        done = torch.isin(tokens, self._eos) | (positions + 1 >= self.tokens.shape[1])
        if self.settings.stop and self.has_stop_string is not None:
            texts = (self.tokens[row, : self.lengths[row]].tolist() for row in rows.tolist())
            stopped = [self.has_stop_string(tokens) for tokens in texts]
            done |= torch.tensor(stopped, device=done.device)
        self.active[rows] = ~done
        return tokens


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number, (n,).

    A token of probability 0 adds nothing to the sum and is never the first.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    # The product can round up to the total itself; the last token with mass is meant then.
    return tokens.minimum((cumulative < total).sum(-1))


def _truncated(probs: Tensor, settings: SamplingSettings) -> Tensor:
    """Probabilities with those that top-k, top-p and min-p leave out set to 0."""
    if settings.top_k:
        kth = probs.topk(min(settings.top_k, probs.shape[-1]), dim=-1).values[:, -1:]
        probs = probs.where(probs >= kth, 0)
    if settings.min_p:
        probs = probs.where(probs >= settings.min_p * probs.amax(-1, keepdim=True), 0)
    if settings.top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = ordered.where(before < settings.top_p * ordered.sum(-1, keepdim=True), 0)
        probs = torch.zeros_like(probs).scatter(-1, order, kept)
    return probs
