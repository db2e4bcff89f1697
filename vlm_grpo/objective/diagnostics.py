"""Metrics of a loss, in a form that adds up over micro-batches and ranks. Names are TRL's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.objective.batch import TokenBatch
from vlm_grpo.objective.kl import k3


@dataclass(frozen=True)
class Metrics:
    """Means kept as (sum, count), and maxima; ``a + b`` is the metrics of both parts together.

    All values are scalars without gradient on the batch's device; nothing is read back to the
    host before ``values`` is called.
    """

    means: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Metrics) -> Metrics:
        means = dict(self.means)
        for name, (total, count) in other.means.items():
            if name in means:
                total, count = means[name][0] + total, means[name][1] + count
            means[name] = (total, count)
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Metrics(means, maxima)

    def cpu(self) -> Metrics:
        """The same in the host's memory, to be sent to other ranks."""
        means = {name: (total.cpu(), count.cpu()) for name, (total, count) in self.means.items()}
        return Metrics(means, {name: value.cpu() for name, value in self.maxima.items()})

    def values(self) -> dict[str, float]:
        """Every metric as a number; a mean over nothing is left out."""
        found = {
            name: (total / count).item() for name, (total, count) in self.means.items() if count > 0
        }
        return found | {name: value.item() for name, value in self.maxima.items()}


@torch.no_grad()
def loss_metrics(
    batch: TokenBatch,
    old: Float[Tensor, " M"],
    reference: Float[Tensor, " M"] | None,
    ratio: Float[Tensor, " M"],
    correction: Float[Tensor, " M"] | None,
    settings: ObjectiveSettings,
) -> Metrics:
    """Metrics over the batch's active tokens.

    ``kl`` is k3 times the token's ratio whatever the settings train on: an unbiased estimate of
    KL(policy ‖ reference), in nats per token, although the old policy sampled. ``clip_ratio`` is
    the share of tokens (of completions at sequence level) where the clip takes the gradient away.

    Args:
        batch: the micro-batch.
        old: log-probs under the policy before the step's first update.
        reference: log-probs under the reference, or None.
        ratio: importance ratio of each token, its completion's at sequence level.
        correction: weights of the sampler correction, or None.
        settings: the objective's.
    """
    active = batch.active_tokens
    if len(active) == 0:
        return Metrics()
    logprobs = batch.logprobs
    means = {"ratio/mean": (ratio, active)}
    maxima = {"ratio/max": ratio}
    if batch.entropies is not None:
        means["entropy"] = (batch.entropies, active)
    if reference is not None:
        means["kl"] = (k3(logprobs, reference) * (logprobs - old).exp(), active)
    for name, clipped in _clipped(batch, ratio, settings).items():
        means[name] = (clipped.to(active.dtype), _clip_weights(batch, settings))
    if batch.sampler_logprobs is not None:
        difference = (old - batch.sampler_logprobs).abs()
        means["sampling/sampling_logp_difference/mean"] = (difference, active)
        maxima["sampling/sampling_logp_difference/max"] = difference
    if correction is not None:
        capped = (correction >= settings.sampler_correction_cap).to(active.dtype)
        means["sampling/importance_sampling_ratio/mean"] = (correction, active)
        means["sampling/importance_sampling_ratio/capped"] = (capped, active)
        maxima["sampling/importance_sampling_ratio/max"] = correction
    return Metrics(
        {name: ((value * weight).sum(), weight.sum()) for name, (value, weight) in means.items()},
        {name: (value * active).max() for name, value in maxima.items()},
    )


def _clipped(
    batch: TokenBatch, ratio: Float[Tensor, " M"], settings: ObjectiveSettings
) -> dict[str, Tensor]:
    """Where the ratio is out of bounds on the side that the advantage's sign makes binding."""
    advantages = batch.per_token_advantages
    if settings.loss_type == "cispo":
        return {"cispo_clip_ratio": (ratio > settings.upper_epsilon) & (advantages > 0)}
    low = (ratio < 1 - settings.epsilon) & (advantages < 0)
    high = (ratio > 1 + settings.upper_epsilon) & (advantages > 0)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }


def _clip_weights(batch: TokenBatch, settings: ObjectiveSettings) -> Float[Tensor, " M"]:
    if settings.importance_sampling_level == "token":
        return batch.active_tokens
    return batch.active_tokens / batch.lengths.clamp(min=1)[batch.completion]
