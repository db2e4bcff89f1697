"""The loss of one micro-batch; the losses of a step's micro-batches add up to the step's loss.

Tokens are flat: a micro-batch holds M completion tokens of N completions, without padding. The loss
is a sum of terms (``TERMS``), in each of which every token has a weight of its own. The weights are
set for the full optimizer step, with normalizers that are totals over it (``StepTotals``), so
neither the split into micro-batches nor the order of completions changes the gradient.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.objective.kl import KL_ESTIMATORS, k3
from vlm_grpo.training.objective.token_batch import (
    MetricAccumulator,
    PerToken,
    StepTotals,
    TokenBatch,
)

Surrogate = Callable[[PerToken, TokenBatch, ObjectiveSettings], PerToken]
"""Maps the importance ratios of M tokens, the batch, with its ``old_logprobs``, and the settings to
the policy loss of each token, before weighting."""

LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT = math.log(1e-8), 20.0
"""Bounds of the logarithm of vespo's sequence weight, as in TRL: its exponential stays finite."""


@dataclass(frozen=True)
class LossOutput:
    """The micro-batch's part of the step's loss (a scalar with gradient), and its metrics."""

    loss: Float[Tensor, ""]
    metrics: MetricAccumulator


@dataclass(frozen=True)
class LossInputs:
    """What the terms of the loss are computed from; its properties on first use."""

    batch: TokenBatch
    settings: ObjectiveSettings
    surrogate: Surrogate  # computes the policy loss of each token

    @cached_property
    def old(self) -> PerToken:
        """Log-probs before the first update, which are the batch's own in that update."""
        old = self.batch.old_logprobs
        return self.batch.logprobs.detach() if old is None else old

    @cached_property
    def ratio(self) -> PerToken:
        """The importance ratio of each token; at sequence level that of its completion, the
        geometric mean over the tokens (GSPO, arXiv:2507.18071)."""
        log_ratio = self.batch.logprobs - self.old
        if self.settings.importance_sampling_level == "sequence":
            log_ratio = self.batch.completion_mean(log_ratio)[self.batch.completion]
        return log_ratio.exp()

    @cached_property
    def correction(self) -> PerToken | None:
        return sampler_weights(replace(self.batch, old_logprobs=self.old), self.settings)

    @property
    def reference(self) -> PerToken | None:
        """The reference's log-probs; the old policy's if that is the reference."""
        if self.batch.reference_logprobs is not None:
            return self.batch.reference_logprobs
        fresh = self.settings.beta > 0 and self.settings.reference_refresh_every == 1
        return self.old.detach() if fresh else None


class Shares(NamedTuple):
    """What weights of the tokens of n completions are made from."""

    policy: Tensor  # (n,) weight of each completion's tokens in the policy loss
    kept: Tensor  # (n,) 1.0 for a completion that counts, 0.0 for a masked one
    tokens: int  # number of active tokens in the step; ``kept / tokens`` gives a mean over them


def compute_loss(
    batch: TokenBatch,
    settings: ObjectiveSettings,
    surrogate: Surrogate | None = None,
    methods: Mapping[str, Any] = MappingProxyType({}),
) -> LossOutput:
    """Compute the sum over terms and tokens of the term's value times the token's weight in it.

    ``surrogate`` computes the policy loss of each token; None: that of ``loss_type``. ``methods``
    are the optional methods (``vlm_grpo.training.methods.Method``) by name, with the terms of the
    loss that are not in ``TERMS``.
    """
    surrogate = surrogate or SURROGATES.get(settings.loss_type, clipped_loss)
    inputs = LossInputs(batch, settings, surrogate)
    terms = {name: TERMS.get(name) or methods[name].term for name in batch.weights}
    parts = [(terms[name](inputs) * weights).sum() for name, weights in batch.weights.items()]
    alone = {n: methods[n] for n in batch.weights.keys() & methods.keys() if methods[n].is_alone}
    metrics = _method_metrics(inputs, alone or methods)
    if not alone:
        metrics = loss_metrics(inputs) + metrics
    return LossOutput(torch.stack(parts).sum(), metrics)


@torch.no_grad()
def _method_metrics(inputs: LossInputs, methods: Mapping[str, Any]) -> MetricAccumulator:
    means = {}
    for method in methods.values() if len(inputs.batch.logprobs) else ():
        means |= method.metrics(inputs.batch, inputs.old)
    if not means:
        return MetricAccumulator()
    active = inputs.batch.active_tokens
    return MetricAccumulator({n: ((v * active).sum(), active.sum()) for n, v in means.items()})


def policy_loss(
    batch: TokenBatch,
    totals: StepTotals,
    settings: ObjectiveSettings,
    surrogate: Surrogate | None = None,
    methods: Mapping[str, Any] = MappingProxyType({}),
) -> LossOutput:
    """Compute the loss of a micro-batch, without weights yet, with those that the settings give its
    tokens; ``surrogate`` and ``methods`` as in ``compute_loss``.
    """
    weights = completion_weights(batch.lengths, batch.active, totals, settings, methods)
    spread = {name: values.to(batch.logprobs)[batch.completion] for name, values in weights.items()}
    return compute_loss(replace(batch, weights=spread), settings, surrogate, methods)


def policy_term(inputs: LossInputs) -> PerToken:
    """Compute the policy loss of each token, with the sampler correction."""
    batch = replace(inputs.batch, old_logprobs=inputs.old)
    values = inputs.surrogate(inputs.ratio, batch, inputs.settings)
    if batch.token_factors is not None:
        values = values * batch.token_factors
    includes_correction = inputs.surrogate is vespo_loss
    if inputs.correction is None or includes_correction:
        return values
    return values * inputs.correction


def kl_term(inputs: LossInputs) -> PerToken:
    """Compute the KL of each token to the reference, times its ratio unless the settings say no."""
    if inputs.reference is None:
        raise ValueError("beta > 0 needs reference_logprobs in the batch")
    kl = KL_ESTIMATORS[inputs.settings.kl_estimator](inputs.batch.logprobs, inputs.reference)
    return kl * inputs.ratio if inputs.settings.use_bias_correction_kl else kl


def entropy_term(inputs: LossInputs) -> PerToken:
    if inputs.batch.entropies is None:
        raise ValueError("entropy_coef needs entropies in the batch")
    return inputs.batch.entropies


TERMS: Mapping[str, Callable[[LossInputs], PerToken]] = {
    "policy": policy_term,
    "kl": kl_term,
    "entropy": entropy_term,
}
"""The terms of the loss besides those of the methods: each computes a token's unweighted value."""


def clipped_loss(ratio: PerToken, batch: TokenBatch, settings: ObjectiveSettings) -> PerToken:
    """Compute −min(ρA, clip(ρ, 1−ε, 1+ε_high)A) of each token.

    Sources: PPO, arXiv:1707.06347, eq. 7; ε_high: DAPO, arXiv:2503.14476, eq. 8; ρ in the first
    term capped at ``delta``: INTELLECT-2, arXiv:2505.07291.
    """
    advantages = batch.per_token_advantages
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.upper_epsilon)
    capped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    return -torch.minimum(capped * advantages, clipped * advantages)


def cispo_loss(ratio: PerToken, batch: TokenBatch, settings: ObjectiveSettings) -> PerToken:
    """Compute −min(ρ, ε_high)·A·log π of each token, without gradient through the weight.

    Sources: MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786.
    """
    weight = ratio.detach().clamp(max=settings.upper_epsilon)
    return -weight * batch.per_token_advantages * batch.logprobs


def sapo_loss(ratio: PerToken, batch: TokenBatch, settings: ObjectiveSettings) -> PerToken:
    """Compute −(4/τ)·σ(τ(ρ − 1))·A of each token, a soft clip; τ depends on the sign of A.

    Its gradient is that of ρA at ρ = 1, and falls smoothly on both sides (Soft Adaptive Policy
    Optimization, arXiv:2511.20347).
    """
    advantages = batch.per_token_advantages
    above, below = settings.sapo_temperature_pos, settings.sapo_temperature_neg
    temperature = torch.full_like(advantages, below).masked_fill(advantages > 0, above)
    return -(temperature * (ratio - 1)).sigmoid() * 4 / temperature * advantages


def vespo_loss(ratio: PerToken, batch: TokenBatch, settings: ObjectiveSettings) -> PerToken:
    """Compute −φ(w)·A·log π of each token, without gradient through the weight.

    w is the ratio of the full completion, with the sampler's correction, and
    φ(w) = e^λ wᵏ e^(−λw), which is 1 at w = 1; k and λ depend on the sign of A (VESPO: Variational
    Sequence-Level Soft Policy Optimization, arXiv:2602.10693).
    """
    old, advantages = batch.old_logprobs, batch.per_token_advantages
    assert old is not None
    difference = (batch.logprobs - old).detach().clamp(-HIGHEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
    log_weight = batch.completion_sum(difference)
    correction = sampler_weights(batch, settings)
    if correction is not None:
        logs = correction.log().clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
        is_one = settings.sampler_correction.startswith("sequence")  # one weight per completion
        log_weight += batch.completion_mean(logs) if is_one else batch.completion_sum(logs)
    log_weight = log_weight.clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
    power, rate = (
        torch.full_like(advantages, below).masked_fill(advantages >= 0, above)
        for above, below in (
            (settings.vespo_k_pos, settings.vespo_k_neg),
            (settings.vespo_lambda_pos, settings.vespo_lambda_neg),
        )
    )
    log_weight = log_weight[batch.completion]
    weight = (rate + power * log_weight - rate * log_weight.exp()).exp()
    return -weight * advantages * batch.logprobs


SURROGATES: Mapping[str, Surrogate] = {"cispo": cispo_loss, "sapo": sapo_loss, "vespo": vespo_loss}
"""By loss type; the others have ``clipped_loss``."""


def completion_weights(
    lengths: Int[Tensor, " n"],
    active: Bool[Tensor, " n"] | None,
    totals: StepTotals,
    settings: ObjectiveSettings,
    methods: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Float[Tensor, " n"]]:
    """Compute the weight of each token of n completions in each term of the loss.

    ``policy``: for grpo and sapo 1 / (completions × the completion's length) (arXiv:2402.03300, eq.
    3); dr_grpo 1 / (completions × max_completion_length) (arXiv:2503.20783); luspo 1 / completions
    (arXiv:2602.05261); dapo, bnpo, cispo and vespo 1 / active tokens of the step (arXiv:2503.14476,
    eq. 8). ``kl``: β times that. ``entropy``: −entropy_coef / active tokens. The methods add the
    weights of their terms. All are 0 for completions whose ``active`` is False (None: none is).
    """
    if missing := sorted(settings.method_terms - methods.keys()):
        raise ValueError(
            f"objective.{missing[0]} adds a term to the loss, which needs its method: give "
            'methods=build_methods({"objective": settings}), from vlm_grpo.training.methods'
        )
    kept = torch.ones_like(lengths) if active is None else active
    kept = kept.double()  # exact for any precision of the log-probs
    completions, tokens = max(totals.completions, 1), max(totals.active_tokens, 1)
    if settings.loss_type == "luspo":
        policy = kept / completions
    elif settings.loss_type in ("grpo", "sapo"):
        policy = kept / lengths.clamp(min=1) / completions
    elif settings.loss_type == "dr_grpo":
        policy = kept / (completions * totals.max_completion_length)
    else:
        policy = kept / tokens
    weights = {"policy": policy}
    if settings.beta > 0 and settings.kl_in == "loss":
        weights["kl"] = settings.beta * policy
    for method in methods.values():
        method.add_weights(weights, Shares(policy, kept, tokens), settings)
    # A fixed order of the terms gives equal sums bit for bit.
    weights = {name: weights[name] for name in sorted(weights, key=lambda n: (n != "policy", n))}
    if settings.entropy_coef:
        weights["entropy"] = -settings.entropy_coef * kept / tokens
    return weights


def sampler_weights(batch: TokenBatch, settings: ObjectiveSettings) -> PerToken | None:
    """Compute π_old / π_sampler of each token, within bounds, or return None without a correction.

    Importance sampling corrects for completions that were sampled from a distribution other than
    the trainer's, or by an earlier policy. ``sequence`` takes the ratio of the full completion.
    Beyond the bounds it is clipped (truncated importance sampling, E. Ionides, J. Comput. Graph.
    Stat. 17(2), 2008), or with ``_mask`` 0; the loss's normalizers still count it, as in TRL.
    """
    if settings.sampler_correction == "none":
        return None
    old = batch.old_logprobs
    if batch.sampler_logprobs is None or old is None:
        raise ValueError("sampler_correction needs sampler_logprobs in the batch")
    level, _, form = settings.sampler_correction.partition("_")
    difference = old.detach() - batch.sampler_logprobs
    if batch.behind_variant is not None:
        difference = difference.masked_fill(batch.behind_variant[batch.completion], 0.0)
    if level == "sequence":
        difference = batch.completion_sum(difference)[batch.completion]
    weights = difference.exp()
    low, high = settings.sampler_correction_bounds
    if form == "mask":
        return weights.where((weights >= low) & (weights <= high), 0.0)
    return weights.clamp(low, high)


@torch.no_grad()
def loss_metrics(inputs: LossInputs) -> MetricAccumulator:
    """Compute metrics over the batch's active tokens.

    ``kl`` is k3 times the token's ratio, whichever KL the settings train on: an unbiased estimate
    of KL(policy ‖ reference), in nats per token, from the old policy's samples. ``clip_ratio``
    is the fraction of tokens (at sequence level, of completions) whose gradient the clip removes;
    ``capped`` and ``rejected`` that of the sampler correction's weights at or beyond a bound.
    """
    batch, settings = inputs.batch, inputs.settings
    old, ratio, correction = inputs.old, inputs.ratio, inputs.correction
    active = batch.active_tokens
    if len(active) == 0:
        return MetricAccumulator()
    means = {"ratio/mean": (ratio, active)}
    maxima = {"ratio/max": ratio}
    if batch.entropies is not None:
        means["entropy"] = (batch.entropies, active)
    if (reference := inputs.reference) is not None:
        change = (batch.logprobs - old).exp()
        means["kl"] = (k3(batch.logprobs, reference) * change, active)
    counted = active
    if settings.importance_sampling_level == "sequence":
        counted = active / batch.lengths.clamp(min=1)[batch.completion]
    for name, clipped in _find_clipped(batch, ratio, settings).items():
        means[name] = (clipped.to(active.dtype), counted)
    if batch.sampler_logprobs is not None:
        difference, compared = (old - batch.sampler_logprobs).abs(), active
        if batch.behind_variant is not None:
            other = batch.behind_variant[batch.completion]
            difference, compared = difference.masked_fill(other, 0.0), active * ~other
        means["sampling/sampling_logp_difference/mean"] = (difference, compared)
        maxima["sampling/sampling_logp_difference/max"] = difference
    minima = {}
    if correction is not None:
        level, _, form = settings.sampler_correction.partition("_")
        counted = active if level == "token" else active / batch.lengths[batch.completion]
        low, high = settings.sampler_correction_bounds
        outside = ((correction <= low) | (correction >= high)).to(active.dtype)
        name = "sampling/importance_sampling_ratio"
        means[f"{name}/mean"] = (correction, counted)
        means[f"{name}/mean_square"] = (correction.square(), counted)
        means[f"{name}/{'rejected' if form else 'capped'}"] = (outside, counted)
        maxima[f"{name}/max"] = minima[f"{name}/min"] = correction
    return MetricAccumulator(
        means={n: ((value * weight).sum(), weight.sum()) for n, (value, weight) in means.items()},
        minima={n: value.where(active > 0, math.inf).min() for n, value in minima.items()},
        maxima={name: (value * active).max() for name, value in maxima.items()},
    )


def _find_clipped(
    batch: TokenBatch, ratio: PerToken, settings: ObjectiveSettings
) -> dict[str, Tensor]:
    """Find the tokens whose ratio is beyond the bound that applies to their advantage's sign, by
    the metric's name; none for losses without bounds."""
    advantages = batch.per_token_advantages
    if settings.loss_type == "cispo":
        return {"cispo_clip_ratio": (ratio > settings.upper_epsilon) & (advantages > 0)}
    if settings.loss_type in ("sapo", "vespo") or settings.loss is not None:
        return {}
    low = (ratio < 1 - settings.epsilon) & (advantages < 0)
    high = (ratio > 1 + settings.upper_epsilon) & (advantages > 0)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }
