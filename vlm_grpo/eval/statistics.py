"""Bootstrap intervals, and paired tests on the same examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

RESAMPLES = 2000
_BATCH = 100  # resamples in memory at once
_TAILS = ((1 - 0.95) / 2, 1 - (1 - 0.95) / 2)
SIGN_FLIPS = 10_000


def bootstrap_interval(*samples: Sequence[float] | np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of the samples' means.

    Each sample is resampled by itself, 2,000 times. Both bounds are NaN if a sample is empty.
    """
    if not samples or not all(len(sample) for sample in samples):
        return math.nan, math.nan
    if all(len(set(sample)) == 1 for sample in samples):  # without variance it is one point
        mean = sum(float(sample[0]) for sample in samples) / len(samples)
        return mean, mean
    parts = [np.asarray(sample, float) for sample in samples]
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(RESAMPLES // _BATCH):
        drawn = [part[rng.integers(0, len(part), (_BATCH, len(part)))] for part in parts]
        means.append(np.mean([values.mean(axis=1) for values in drawn], axis=0))
    low, high = stats.quantile(np.concatenate(means), _TAILS)
    return float(low), float(high)


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


@dataclass(frozen=True)
class PairedTest:
    """The result of a paired test of B against A."""

    test: str  # "McNemar" for values of 0 and 1, otherwise "sign flips"
    n: int  # number of pairs
    a: float  # mean of each side
    b: float
    interval: tuple[float, float]  # 95 % bootstrap interval of the mean of b - a
    p_value: float  # two-sided; A and B are exchangeable on every example under the hypothesis
    higher: int  # pairs in which B has the higher value
    lower: int


def compare_pairs(a: Sequence[float], b: Sequence[float], seed: int = 0) -> PairedTest:
    """Test B against A: by McNemar's exact test if all values are 0 or 1, else by sign flips."""
    differences = [second - first for first, second in zip(a, b, strict=True)]
    higher, lower = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    binary = {*a, *b} <= {0.0, 1.0}
    p_value = mcnemar_p_value(higher, lower) if binary else sign_flip_p_value(differences, seed)
    name, means = "McNemar" if binary else "sign flips", (float(np.mean(a)), float(np.mean(b)))
    interval = bootstrap_interval(differences, seed=seed)
    return PairedTest(name, len(differences), *means, interval, p_value, higher, lower)


def mcnemar_p_value(gained: int, lost: int) -> float:
    """Return the p-value of McNemar's exact test.

    Under the null hypothesis, each of the pairs that differ is a fair coin:
    ``p = min(1, 2 · P(X <= min(gained, lost)))`` with X ~ Binomial(gained + lost, 1/2).
    Source: McNemar 1947, Psychometrika 12; exact form: Agresti 2013, Categorical Data Analysis,
    section 11.1.

    >>> mcnemar_p_value(10, 2)  # 2 · (1 + 12 + 66) / 2 ** 12
    0.03857421875
    """
    if gained + lost == 0:
        return 1.0
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue)


def sign_flip_p_value(differences: Sequence[float], seed: int = 0) -> float:
    """Return the p-value of the sign-flip permutation test of the mean difference.

    Under the null hypothesis, each difference may as well have the other sign. The p-value is the
    share of all assignments of signs whose sum is at least as far from 0 as the observed one: exact
    for up to 13 differences that are not 0; otherwise from 10,000 random assignments, with one
    added to both counts.

    Source: Fisher 1935, The Design of Experiments, section 21; Phipson and Smyth 2010, Statistical
    Applications in Genetics and Molecular Biology 9.

    >>> sign_flip_p_value([0.5, 1.0, 2.0])  # only (+, +, +) and (-, -, -) are as far: 2 of 8
    0.25
    """
    changed = np.asarray([value for value in differences if value], float)
    if len(changed) < 2:  # with either sign, one is as far
        return 1.0
    how: dict[str, Any] = {"permutation_type": "samples", "n_resamples": SIGN_FLIPS}
    test = stats.permutation_test(
        (changed,), np.sum, **how, vectorized=True, batch=_BATCH, rng=seed
    )
    return float(test.pvalue)


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number by Holm's method.

    Source: Holm 1979, Scandinavian Journal of Statistics 6.

    >>> adjust_p_values([0.01, 0.5, 0.02])  # 3 · 0.01, then 2 · 0.02, then 0.5
    [0.03, 0.5, 0.04]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
