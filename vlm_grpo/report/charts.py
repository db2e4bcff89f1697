"""Charts as data; the page draws them (``charts.js``), so that they can be zoomed and filtered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_POINTS = 2000
"""Most points of a line; longer lines are downsampled by averaging."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    x: Sequence[float]  # steps, or values of a setting
    y: Sequence[float]  # values; NaN where a value is missing
    # low, high: bounds of a band around the line; None for no band.
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    # number of the color and dash pattern; None: its position in the chart
    series: int | None = None
    # what each point is, such as the name of a run; None: nothing but its x
    labels: Sequence[str] | None = None

    @property
    def has_values(self) -> bool:
        return any(math.isfinite(value) for value in self.y)


@dataclass(frozen=True)
class HeatMap:
    """Distributions of a value, one per column."""

    edges: Sequence[float]  # bounds of the columns, in steps; one more than columns
    bins: Sequence[float]  # bounds of the rows; one more than rows
    shares: Sequence[Sequence[float]]  # share of the values by column and row; a column sums to 1
    ticks: Sequence[float] | None = None  # values on the vertical axis; None: round numbers


@dataclass(frozen=True)
class Chart:
    """The contents of a chart."""

    title: str
    help: str
    # lines in drawing order; of a heat map, they are shown at the pointer only
    lines: Sequence[Line]
    share: bool = False  # values are fractions of 1 and are shown as percentages
    # values are single measurements, drawn as dots; otherwise they are noisy values of every step,
    # over which a moving mean is drawn
    measured: bool = False
    stacked: bool = False
    logarithmic: bool = False
    # what is on the horizontal axis; charts with the same one are zoomed together
    axis: str = "step"
    logarithmic_x: bool = False
    # names of the values 0, 1, … on the horizontal axis; None: it has numbers
    ticks: Sequence[str] | None = None
    heat: HeatMap | None = None

    @property
    def has_values(self) -> bool:
        return any(line.has_values for line in self.lines)


def pack_charts(charts: Sequence[Chart]) -> dict[str, Any]:
    """Return the charts' data for the page; lines without values are omitted.

    Equal horizontal positions are stored once, in ``xs``, to which the lines' ``x`` refers.
    """
    positions: dict[tuple[float, ...], int] = {}
    packed = []
    for chart in charts:
        lines = []
        for number, line in enumerate(line for line in chart.lines if line.has_values):
            short = _downsample(line)
            lines.append(
                {
                    **vars(line),
                    "series": number if line.series is None else line.series,
                    "x": positions.setdefault(tuple(short.x), len(positions)),
                    "y": _round(short.y),
                    "low": _round(short.low),
                    "high": _round(short.high),
                }
            )
        heat = None
        if chart.heat is not None:
            shares = [[round(share, 3) for share in column] for column in chart.heat.shares]
            heat = {**vars(chart.heat), "shares": shares}
        packed.append({**vars(chart), "lines": lines, "heat": heat})
    return {"charts": packed, "xs": list(positions)}


def _downsample(line: Line) -> Line:
    """Return the line with at most ``MAX_POINTS`` points, by averaging neighbors."""
    size = math.ceil(len(line.x) / MAX_POINTS)
    if size == 1:
        return line

    def means(values: Sequence[float]) -> list[float]:
        parts = [values[i : i + size] for i in range(0, len(values), size)]
        known = [[value for value in part if math.isfinite(value)] for part in parts]
        return [sum(part) / len(part) if part else math.nan for part in known]

    low, high = (None if bound is None else means(bound) for bound in (line.low, line.high))
    return replace(line, x=means(line.x), y=means(line.y), low=low, high=high)


def _round(values: Sequence[float] | None) -> list[float | None] | None:
    """Return the values with four significant digits, and None for those that are not finite."""
    if values is None:
        return None
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
