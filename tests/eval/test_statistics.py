"""Bootstrap intervals and paired tests against direct computations, and edge cases."""

import math

import numpy as np
import pytest

from vlm_grpo.eval import statistics
from vlm_grpo.eval.statistics import bootstrap_interval, mcnemar_p_value, sign_flip_p_value


def test_the_seed_determines_the_interval_and_equal_values_have_a_point():
    values = np.random.default_rng(0).normal(size=20).tolist()
    first, again, other = (bootstrap_interval(values, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert bootstrap_interval([1.0, 1.0], seed=0) == (1.0, 1.0)
    assert bootstrap_interval([0.25], seed=0) == (0.25, 0.25)
    assert all(math.isnan(bound) for bound in bootstrap_interval([], seed=0))


def test_sign_flips_of_equal_size_agree_with_mcnemar_and_p_values_are_adjusted():
    # With differences of ±1, the sum of random signs is that of fair coins.
    differences = [1.0] * 40 + [-1.0] * 22 + [0.0] * 100
    exact = mcnemar_p_value(40, 22)
    deviation = math.sqrt(exact * (1 - exact) / 10_000)
    assert sign_flip_p_value(differences) == pytest.approx(exact, abs=4 * deviation)
    assert sign_flip_p_value([0.0, 0.3]) == sign_flip_p_value([0.0]) == 1.0  # nothing to compare
    assert sign_flip_p_value([0.25, 0.25]) == 0.5  # only (+, +) and (-, -) are as far: 2 of 4
    assert sign_flip_p_value(differences) == sign_flip_p_value(differences)  # seeded
    # Adjusted p-values are ordered and at most one.
    adjust = statistics.adjust_p_values
    assert adjust([0.04, 0.03]) == pytest.approx([0.06, 0.06])  # 2 · 0.03, then no less
    assert adjust([0.9, 0.8]) == [1.0, 1.0]
    assert adjust([]) == []
