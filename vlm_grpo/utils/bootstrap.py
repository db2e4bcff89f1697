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
    if not values:
        return math.nan, math.nan
    if len(set(values)) == 1:  # without variance the interval is one point
        return values[0], values[0]
    result = stats.bootstrap(
        (np.asarray(values),),
        np.mean,
        n_resamples=2000,
        method="percentile",
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
