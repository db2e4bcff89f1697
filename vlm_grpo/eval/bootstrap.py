"""Bootstrap confidence intervals of a mean, and values as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean, from 2,000 resamples.

    Args:
        values: the sample.
        seed: seed of the resampling.

    Returns:
        Lower and upper bound; NaN for an empty sample.
    """
    return bootstrap_mean_of_means([values], seed)


def bootstrap_mean_of_means(samples: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """Return the interval of ``bootstrap_interval`` for the mean of the samples' means.

    Each sample is resampled by itself.

    Args:
        samples: the samples.
        seed: seed of the resampling.

    Returns:
        Lower and upper bound; NaN if a sample is empty.
    """
    if not samples or not all(samples):
        return math.nan, math.nan
    if all(len(set(sample)) == 1 for sample in samples):  # without variance it is one point
        mean = sum(sample[0] for sample in samples) / len(samples)
        return mean, mean
    result = stats.bootstrap(
        [np.asarray(sample) for sample in samples],
        lambda *parts, axis: np.mean([part.mean(axis=axis) for part in parts], axis=0),
        n_resamples=2000,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
        batch=100,
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def format_value(value: float, is_error: bool = False, space: str = "") -> str:
    """Format a metric: a share in percent; an error, or a number over 1, as it is.

    >>> format_value(0.884), format_value(0.25, is_error=True), format_value(math.nan)
    ('88.4%', '0.250', 'unknown')
    """
    if math.isnan(value):
        return "unknown"
    if is_error:
        return f"{value:.3f}"
    return f"{100 * value:.1f}{space}%" if -1.0 <= value <= 1.0 else f"{value:.3g}"
