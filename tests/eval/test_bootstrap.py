"""The bootstrap interval against a direct computation, the normal approximation and edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vlm_grpo.eval.bootstrap import bootstrap_interval


def test_the_interval_equals_the_percentiles_of_resampled_means() -> None:
    values = np.random.default_rng(0).normal(size=50)
    random = np.random.default_rng(1)
    means = random.choice(values, size=(200_000, 50)).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    # The standard error of a 2.5 % quantile of 2,000 means is about 0.06 standard errors of the
    # mean (0.14), and 0.03 is more than three times that.
    assert bootstrap_interval(values.tolist(), seed=0) == pytest.approx((low, high), abs=0.03)


def test_the_interval_of_proportions_equals_the_normal_approximation() -> None:
    low, high = bootstrap_interval([0.0] * 60 + [1.0] * 40, seed=0)
    # 0.4 ± 1.96 · sqrt(0.4 · 0.6 / 100) = 0.304 … 0.496
    assert (low, high) == (pytest.approx(0.304, abs=0.02), pytest.approx(0.496, abs=0.02))


def test_the_seed_determines_the_interval() -> None:
    values = np.random.default_rng(0).normal(size=20).tolist()
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_equal_values_have_a_point_and_no_values_have_nan() -> None:
    assert bootstrap_interval([1.0, 1.0], seed=0) == (1.0, 1.0)
    assert bootstrap_interval([0.25], seed=0) == (0.25, 0.25)
    assert all(math.isnan(bound) for bound in bootstrap_interval([], seed=0))
