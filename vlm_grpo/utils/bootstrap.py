"""Confidence intervals of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean, from 2,000 resamples; NaN of nothing."""
    if not values:
        return math.nan, math.nan
    if len(set(values)) == 1:  # nothing varies: the bootstrap has nothing to say
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
