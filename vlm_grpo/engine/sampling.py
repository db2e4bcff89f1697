"""The sampling distribution: one definition for the sampler and the scorer.

A log-probability is relative to a distribution. ``SamplingDistribution`` defines which tokens it
excludes, and its temperature; the rollout samples from it and the update scores under it, so the
importance ratio of a fresh completion is 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.config.policy import RolloutSettings
from vlm_grpo.families import Family


@dataclass(frozen=True)
class SamplingDistribution:
    """The distribution over next tokens that both sampler and scorer derive from the logits.

    Attributes:
        temperature: divisor of the logits; 0 means greedy (scored as 1).
        banned: tokens of probability 0 (image, video and vision markers).
        eos: end-of-sequence tokens, also banned in the first ``min_new_tokens`` positions.
        min_new_tokens: minimum number of tokens per completion.
    """

    temperature: float = 1.0
    banned: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def __call__(
        self, logits: Float[Tensor, "n vocabulary"], positions: Int[Tensor, " n"]
    ) -> Float[Tensor, "n vocabulary"]:
        """Return the distribution's logits as a new tensor of at least float32 precision.

        Args:
            logits: the model's logits.
            positions: index of each token within its completion.
        """
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        adjusted = wide / (self.temperature or 1.0)
        if self.banned:
            adjusted[:, list(self.banned)] = -torch.inf
        if self.min_new_tokens:
            early = (positions < self.min_new_tokens)[:, None]
            columns = adjusted[:, list(self.eos)]
            adjusted[:, list(self.eos)] = columns.masked_fill(early, -torch.inf)
        return adjusted


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of the sampler.

    Attributes:
        distribution: the distribution under which tokens are scored.
        max_completion_length: maximum number of tokens per completion, end-of-sequence included.
        stop: strings that end a completion once its text contains one of them.
        top_k: keep only the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this mass; 1.0 keeps all.
        min_p: drop tokens below this fraction of the highest probability; 0.0 keeps all.
    """

    distribution: SamplingDistribution
    max_completion_length: int
    stop: tuple[str, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.distribution.temperature == 0

    @property
    def truncates(self) -> bool:
        """True if the sampler excludes tokens that the scorer does not."""
        return bool(self.top_k or self.min_p or self.top_p < 1)


def build_sampling_distribution(
    model: Any, family: Family, rollout: RolloutSettings
) -> SamplingDistribution:
    """Build the distribution from the model's special tokens and the rollout settings."""
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
    """Build the sampling settings of a rollout from ``distribution``."""
    return SamplingSettings(
        distribution,
        rollout.max_completion_length,
        rollout.stop,
        rollout.top_k,
        rollout.top_p,
        rollout.min_p or 0.0,
    )


def draw_uniforms(seed: Sequence[int | str], length: int) -> np.ndarray:
    """Draw the ``length`` uniform numbers in [0, 1) from which a completion's tokens are sampled.

    Each completion has a separate random stream, identified by its seed: in training the run's
    seed, the prompt's index in the stream of examples, and the completion's index in the group.
    Its tokens therefore do not depend on the batch it is sampled in, on the number of ranks, or on
    the state of any generator.
    """
    digest = hashlib.blake2b(repr(tuple(seed)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(
        length
    )


class SamplerState:
    """The tokens sampled so far for N completions, with log-probabilities and entropies.

    Args:
        uniform: the uniform numbers to sample with; see ``draw_uniforms``.
        settings: the sampler's settings.
        has_stop_string: returns whether a completion's tokens contain a stop string; called after
            each token if ``settings.stop`` is set.

    Attributes:
        tokens: (N, longest) int64, valid up to ``lengths``.
        logprobs: (N, longest) log-probability of each token under the distribution that it was
            sampled from, after any truncation.
        entropies: (N, longest) entropy at each token, before any truncation.
        lengths: (N,) number of tokens sampled.
        active: (N,) False once a completion is finished.
    """

    def __init__(
        self,
        uniform: Float[Tensor, "N longest"],
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

    def sample(
        self, logits: Float[Tensor, "n vocabulary"], rows: Int[Tensor, " n"]
    ) -> Int[Tensor, " n"]:
        """Sample, store and return the next token of n completions; mark finished ones inactive.

        Args:
            logits: the model's logits.
            rows: indices of the completions, all active.
        """
        positions = self.lengths[rows]
        adjusted = self.settings.distribution(logits, positions)
        logprobs = adjusted.log_softmax(-1)
        probs = logprobs.exp()
        # A banned token has probability 0 and log-probability -inf; 0 times a finite number is 0.
        entropies = -(probs * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)
        if self.settings.is_greedy:
            tokens = adjusted.argmax(-1)
        elif self.settings.truncates:
            kept = _truncate(probs, self.settings)
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


def _invert(
    probs: Float[Tensor, "n vocabulary"], uniform: Float[Tensor, " n"]
) -> Int[Tensor, " n"]:
    """Return the first token whose cumulative probability exceeds the uniform number.

    A token of probability 0 adds nothing to the sum, so it is never returned.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    # The product can round up to the total; then return the last token with a probability above 0.
    return tokens.minimum((cumulative < total).sum(-1))


def _truncate(
    probs: Float[Tensor, "n vocabulary"], settings: SamplingSettings
) -> Float[Tensor, "n vocabulary"]:
    """Set the probabilities that top-k, min-p and top-p exclude to 0."""
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
