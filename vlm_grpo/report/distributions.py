"""Heat maps of the distributions that a run records at every step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from vlm_grpo.report.charts import Chart, HeatMap, Line
from vlm_grpo.report.run import Run, is_number

TITLES = {
    "reward": ("Distribution of the reward", "Share of the step's completions by total reward."),
    "completions/length": (
        "Distribution of the completion length",
        "Share of the step's completions by length, in tokens.",
    ),
}
COLUMNS = 150
"""Most columns of a heat map; consecutive steps share a column."""
BINS = 24
"""Rows of a heat map of a value with more distinct values than this."""
LABELED = 6
"""Most distinct values that are all on the vertical axis."""


def build_distribution_charts(run: Run, series: int = 0, label: str = "") -> Iterator[Chart]:
    """Yield the heat map of each distribution that the run has recorded.

    Args:
        series: number of the run's color.
        label: the run's name; "" for a single run.
    """
    for name, (title, help_) in TITLES.items():
        by_step = dict(_read(run, name))
        if by_step:
            heat = build_heat_map(by_step)
            lines = [
                Line(
                    text, list(by_step), [_quantile(v, q) for v in by_step.values()], series=series
                )
                for text, q in (("90 %", 0.9), ("median", 0.5), ("10 %", 0.1))
            ]
            yield Chart(f"{title}: {label}" if label else title, help_, lines, heat=heat)


def build_heat_map(by_step: Mapping[int, Sequence[float]]) -> HeatMap:
    """Return the heat map of values by step, in the order of the steps.

    Few distinct values, such as 0 and 1, get a row each, and others bins of equal width.
    """
    steps = list(by_step)
    distinct = sorted({value for values in by_step.values() for value in values})
    bins = _choose_bins(distinct)
    size = math.ceil(len(steps) / COLUMNS)
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    shares = []
    for part in parts:
        values = [value for step in part for value in by_step[step]]
        counts = [0] * (len(bins) - 1)
        for value in values:
            counts[min(bisect_right(bins, value), len(bins) - 1) - 1] += 1
        shares.append([count / len(values) for count in counts])
    edges = [part[0] - 0.5 for part in parts] + [steps[-1] + 0.5]
    return HeatMap(edges, bins, shares, distinct if len(distinct) <= LABELED else None)


def _read(run: Run, name: str) -> Iterator[tuple[int, list[float]]]:
    for row in run.distributions:
        values = row.get(name)
        numbers = [v for v in values if is_number(v)] if isinstance(values, list) else []
        if numbers:
            yield row["step"], sorted(float(value) for value in numbers)


def _choose_bins(values: Sequence[float]) -> list[float]:
    """Return the bounds of the rows for these distinct values, in ascending order."""
    low, high = values[0], values[-1]
    if len(values) > BINS:
        return [low + (high - low) * i / BINS for i in range(BINS + 1)]
    if len(values) == 1:
        return [low - 0.5, low + 0.5]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    return [2 * low - middles[0], *middles, 2 * high - middles[-1]]


def _quantile(values: Sequence[float], q: float) -> float:
    """Return the quantile of sorted values, without interpolation."""
    return values[min(len(values) - 1, int(q * len(values)))]
