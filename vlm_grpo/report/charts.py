"""Curves of a run, or of two, as SVG that takes its colours from the page around it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT = 4.7, 2.45
"""Of a chart, in inches."""
MAX_POINTS = 400
"""Of a line; more are averaged, for nobody sees them."""

# Colours that stand for the page's own: they are replaced by its variables, so that one SVG is
# right in the light and in the dark.
_INK, _GRID = "#010101", "#020202"
_SERIES = tuple(f"#03030{number}" for number in range(8))
_VARIABLES = {_INK: "var(--muted)", _GRID: "var(--grid)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(_SERIES)
}


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: for the legend.
        x: steps.
        y: values; NaN where there is none.
        low, high: a band around it; None without one.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    @property
    def known(self) -> bool:
        return any(math.isfinite(value) for value in self.y)


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Attributes:
        title: what it is of.
        help: what a reader should know of it, in a sentence.
        lines: drawn in this order.
        share: values are shares of 1 and are shown from 0 to 100 %.
        measured: single measurements, shown as dots; otherwise noisy values at every step, over
            which a moving mean is drawn.
        stacked: the lines are parts of a whole and are stacked.
        logarithmic: the values span orders of magnitude.
    """

    title: str
    help: str
    lines: Sequence[Line]
    share: bool = False
    measured: bool = False
    stacked: bool = False
    logarithmic: bool = False


@dataclass(frozen=True)
class Drawn:
    """A chart as the page takes it.

    Attributes:
        svg: the picture.
        data: what is read out under the pointer: where the axes lie in the picture (0 to 1), the
            steps they span, and the lines' values.
    """

    chart: Chart
    svg: str
    data: Mapping[str, Any]

    @property
    def legend(self) -> bool:
        """Whether the lines need their names beside the title."""
        names = [line["name"].replace("_", " ") for line in self.data["lines"]]
        return len(names) > 1 or names[0].lower() not in self.chart.title.lower()


def draw(chart: Chart) -> Drawn:
    """Draw a chart; lines without a single value are left out."""
    lines = [_thinned(line) for line in chart.lines if line.known]
    if not any(value > 0 for line in lines for value in line.y):  # zeros have no logarithm
        chart = replace(chart, logarithmic=False)
    # Text stays text, in the page's font; equal charts give equal bytes.
    options: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.title,
        "font.size": 8.5,
    }
    with matplotlib.rc_context(options):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        axes = figure.add_axes((0.115, 0.13, 0.865, 0.82))
        _style(axes, chart)
        if chart.stacked:
            _stack(axes, lines)
        else:
            for line, color in zip(lines, _SERIES * len(lines), strict=False):
                _plot(axes, line, color, chart)
        _limit(axes, chart, lines)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    left, right = axes.get_xlim()
    box = axes.get_position()
    data = {
        "span": [box.x0, box.x1],
        "steps": [left, right],
        "share": chart.share,
        "lines": [
            {"name": line.name, "x": list(line.x), "y": [_short(v) for v in line.y]}
            for line in lines
        ],
    }
    return Drawn(chart, _themed(buffer.getvalue()), data)


def _style(axes: Axes, chart: Chart) -> None:
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    axes.tick_params(length=0, colors=_INK, labelcolor=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if chart.logarithmic:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))


def _plot(axes: Axes, line: Line, color: str, chart: Chart) -> None:
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    if line.low is not None and line.high is not None:
        axes.fill_between(x, line.low, line.high, color=color, alpha=0.16, linewidth=0)
    if chart.measured or len(x) < 3:
        axes.plot(x, y, color=color, linewidth=1.8, marker="o", markersize=4.5)
        return
    window = max(1, len(x) // 20)
    if window > 1:
        axes.plot(x, y, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(x, _moving_mean(y, window), color=color, linewidth=1.8)


def _stack(axes: Axes, lines: Sequence[Line]) -> None:
    if lines:
        values = [np.nan_to_num(np.asarray(line.y, float)) for line in lines]
        colors = (_SERIES * len(lines))[: len(lines)]
        axes.stackplot(np.asarray(lines[0].x, float), values, colors=colors, alpha=0.85)


def _limit(axes: Axes, chart: Chart, lines: Sequence[Line]) -> None:
    steps = [step for line in lines for step in line.x]
    left, right = min(steps, default=0), max(steps, default=1)
    margin = max(0.5, 0.02 * (right - left))
    axes.set_xlim(left - margin, right + margin)
    if chart.share:
        values = [v for line in lines for v in (*line.y, *(line.high or ())) if math.isfinite(v)]
        top = max(values, default=1.0)
        axes.set_ylim(0, 1.0 if top > 0.45 else max(0.05, 1.15 * top))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
        return
    if chart.logarithmic:
        return
    if axes.get_ylim()[0] >= 0:
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    # Each label is whole: a common factor beside the axis would be cut off by the picture's edge.
    axes.yaxis.set_major_formatter(lambda value, _: tick(value, high - low))


def tick(value: float, span: float) -> str:
    """A label of an axis over ``span``, in at most seven characters where three digits tell all."""
    if abs(value) < 1e-9 * span:
        return "0"  # what rounding has left of it
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{value:.3g}")


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over ``window`` values, fewer at the ends and where some are NaN."""
    kernel = np.ones(window)
    known = np.isfinite(values)
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    counts = np.convolve(known.astype(float), kernel, mode="same")
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _thinned(line: Line) -> Line:
    """At most ``MAX_POINTS`` points, each the mean of as many neighbours."""
    size = math.ceil(len(line.x) / MAX_POINTS)
    if size == 1:
        return line

    def means(values: Sequence[float] | None) -> list[float] | None:
        if values is None:
            return None
        parts = [values[i : i + size] for i in range(0, len(values), size)]
        known = [[value for value in part if math.isfinite(value)] for part in parts]
        return [sum(part) / len(part) if part else math.nan for part in known]

    return Line(
        line.name, means(line.x) or (), means(line.y) or (), means(line.low), means(line.high)
    )


def _themed(svg: str) -> str:
    """The ``svg`` element alone, its colours and font those of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px '[^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1
    )
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
