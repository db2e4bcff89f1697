"""Bootstrap confidence intervals of a mean."""

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
