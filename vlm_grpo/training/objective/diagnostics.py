"""Metrics of the loss, and the accumulation of all metrics over the parts of a step.

A metric that TRL also logs has TRL's name.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.objective.batch import TokenBatch
from vlm_grpo.training.objective.kl import k3

Number = Tensor | float | int
T = TypeVar("T")


@dataclass(frozen=True)
class MetricAccumulator:
    """Metrics of one part of a step; ``a + b`` combines the metrics of two parts.

    Parts are micro-batches, updates or ranks. A value is a number, or a scalar tensor without
    gradient, which stays on its device until ``cpu`` or ``values`` is called.
    """

    # sum and count of each mean by name
    means: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    minima: Mapping[str, Number] = field(default_factory=dict)
    maxima: Mapping[str, Number] = field(default_factory=dict)
    sums: Mapping[str, int] = field(default_factory=dict)
    # all values by name, reported as ``NAME/mean`` and ``NAME/std``
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __add__(self, other: MetricAccumulator) -> MetricAccumulator:
        return MetricAccumulator(
            _merge(self.means, other.means, lambda a, b: (a[0] + b[0], a[1] + b[1])),
            _merge(self.minima, other.minima, _minimum),
            _merge(self.maxima, other.maxima, _maximum),
            _merge(self.sums, other.sums, operator.add),
            _merge(self.samples, other.samples, operator.add),
        )

    def cpu(self) -> MetricAccumulator:
        """Copy the metrics to host memory, with one read from the device for each dtype."""
        values = [*itertools.chain(*self.means.values())]
        values += [*self.minima.values(), *self.maxima.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        found: dict[int, Tensor] = {}
        for dtype in {tensor.dtype for tensor in tensors}:
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            found |= zip(map(id, alike), map(Tensor.clone, torch.stack(alike).cpu()), strict=True)

        def get(value: Number) -> Number:
            return found.get(id(value), value)

        means = {name: (get(total), get(count)) for name, (total, count) in self.means.items()}
        minima = {name: get(value) for name, value in self.minima.items()}
        maxima = {name: get(value) for name, value in self.maxima.items()}
        return replace(self, means=means, minima=minima, maxima=maxima)

    def values(self, empty: float | None = None) -> dict[str, float | int]:
        """Return every metric as a number; a deviation of fewer than two samples is NaN. ``empty``
        is the value of a mean with count 0; None: the mean is left out.
        """
        found: dict[str, float | int] = {}
        for name, (total, count) in self.means.items():
            if count > 0:
                found[name] = _number(total / count)
            elif empty is not None:
                found[name] = empty
        extremes = {**self.minima, **self.maxima}
        found |= {name: _number(value) for name, value in extremes.items()}
        for name, values in self.samples.items():
            found[f"{name}/mean"] = statistics.fmean(values) if values else math.nan
            found[f"{name}/std"] = statistics.stdev(values) if len(values) > 1 else math.nan
        return {**found, **self.sums}


def _merge(a: Mapping[str, T], b: Mapping[str, T], combine: Callable[[T, T], T]) -> dict[str, T]:
    merged = dict(a)
    for name, value in b.items():
        merged[name] = combine(merged[name], value) if name in merged else value
    return merged


def _minimum(a: Number, b: Number) -> Number:
    return torch.minimum(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else min(a, b)


def _maximum(a: Number, b: Number) -> Number:
    return torch.maximum(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else max(a, b)


def _number(value: Number) -> float | int:
    return value.item() if isinstance(value, Tensor) else value


@torch.no_grad()
def loss_metrics(
    batch: TokenBatch,
    old: Float[Tensor, " M"],
    reference: Float[Tensor, " M"] | None,
    ratio: Float[Tensor, " M"],
    correction: Float[Tensor, " M"] | None,
    settings: ObjectiveSettings,
) -> MetricAccumulator:
    """Compute metrics over the batch's active tokens.

    ``kl`` is k3 times the token's ratio, whichever KL the settings train on: an unbiased estimate
    of KL(policy ‖ reference), in nats per token, from the old policy's samples. ``clip_ratio``
    is the fraction of tokens (at sequence level, of completions) whose gradient the clip removes;
    ``capped`` and ``rejected`` that of the sampler correction's weights at or beyond a bound.
    """
    active = batch.active_tokens
    if len(active) == 0:
        return MetricAccumulator()
    logprobs = batch.logprobs
    means = {"ratio/mean": (ratio, active)}
    maxima = {"ratio/max": ratio}
    if batch.entropies is not None:
        means["entropy"] = (batch.entropies, active)
    if reference is not None:
        means["kl"] = (k3(logprobs, reference) * (logprobs - old).exp(), active)
    for name, clipped in _find_clipped(batch, ratio, settings).items():
        means[name] = (clipped.to(active.dtype), _clip_weights(batch, settings))
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
    batch: TokenBatch, ratio: Float[Tensor, " M"], settings: ObjectiveSettings
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


def _clip_weights(batch: TokenBatch, settings: ObjectiveSettings) -> Float[Tensor, " M"]:
    if settings.importance_sampling_level == "token":
        return batch.active_tokens
    return batch.active_tokens / batch.lengths.clamp(min=1)[batch.completion]
