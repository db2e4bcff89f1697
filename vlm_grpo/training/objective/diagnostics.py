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
from torch import Tensor

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
