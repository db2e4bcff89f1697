"""Inputs of the loss, the tokens of one micro-batch and the totals of its step; and its metrics."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

PerToken = Float[Tensor, " M"]
"""A value for each of M tokens."""
Number = Tensor | float | int
T = TypeVar("T")


@dataclass(frozen=True)
class TokenBatch:
    """The M tokens of N complete completions, without padding. Log-probs are in nats."""

    logprobs: PerToken  # log-probs under the trained policy, with gradient
    completion: Int[Tensor, " M"]  # index in 0..N−1 of each token's completion
    advantages: Float[Tensor, " N"]
    lengths: Int[Tensor, " N"]
    # log-probs under the policy before the step's first update, without gradient; None in the first
    # update, where they equal ``logprobs``
    old_logprobs: PerToken | None = None
    # log-probs under the reference policy, without gradient; None if no separate reference is kept
    reference_logprobs: PerToken | None = None
    token_factors: PerToken | None = None  # of each token's weight in the policy loss; None: 1
    sampler_logprobs: PerToken | None = None
    # True for a completion sampled behind another form of its prompt, whose sampler log-probs are
    # not compared with the policy's; None: there is none
    behind_variant: Bool[Tensor, " N"] | None = None
    # entropy of the policy's distribution at each token, with gradient if there is an entropy bonus
    entropies: PerToken | None = None
    active: Bool[Tensor, " N"] | None = None  # False: masked out (truncated); None: all are active
    # log-probs of k candidates at each token's place, with gradient, which a method has chosen
    candidate_logprobs: Float[Tensor, "M k"] | None = None
    is_top: Bool[Tensor, " M"] | None = None  # whether it is the policy's likeliest; None: unknown
    token_advantages: PerToken | None = None  # None: that of the token's completion
    # weight of each token in each term of the loss, by its name, with the step's normalizer
    weights: Mapping[str, PerToken] = field(default_factory=dict)
    # what methods scored of each token, by name, without gradient
    scores: Mapping[str, Shaped[Tensor, "M ..."]] = field(default_factory=dict)

    @property
    def per_token_advantages(self) -> PerToken:
        if self.token_advantages is not None:
            return self.token_advantages
        return self.advantages[self.completion]

    @property
    def active_tokens(self) -> PerToken:
        """1 for each token of an active completion, 0 for the others."""
        if self.active is None:
            return torch.ones_like(self.logprobs, requires_grad=False)
        return self.active[self.completion].to(self.logprobs.dtype)

    def completion_sum(self, values: PerToken) -> Float[Tensor, " N"]:
        return values.new_zeros(len(self.lengths)).index_add(0, self.completion, values)

    def completion_mean(self, values: PerToken) -> Float[Tensor, " N"]:
        """Return the mean over each completion's tokens; 0 for one without tokens."""
        return self.completion_sum(values) / self.lengths.clamp(min=1)


@dataclass(frozen=True)
class StepTotals:
    """Normalizers of a step's loss, counted over all its micro-batches and all ranks.

    If data-parallel training averages gradients over R ranks, multiply each loss by R.
    """

    completions: int  # number of completions, masked ones included (as TRL counts)
    active_tokens: int  # number of tokens of completions that are not masked out
    max_completion_length: int  # length limit of the sampler, in tokens

    @classmethod
    def from_lengths(
        cls,
        lengths: Int[Tensor, " n"],
        active: Bool[Tensor, " n"] | None,
        max_completion_length: int,
    ) -> StepTotals:
        counted = lengths if active is None else lengths[active]
        return cls(len(lengths), int(counted.sum()), max_completion_length)


@dataclass(frozen=True)
class MetricAccumulator:
    """Metrics of one part of a step; ``a + b`` combines the metrics of two parts.

    Parts are micro-batches, updates or ranks. A value is a number, or a scalar tensor without
    gradient, which stays on its device until ``cpu`` or ``values`` is called.
    """

    means: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)  # sum and count
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
