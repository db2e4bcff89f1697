"""Draw metric curves as SVG in the colors of the page."""

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
"""Size of a chart, in inches."""
MAX_POINTS = 400
"""Most points of a line; longer lines are downsampled by averaging."""

# Placeholders that the page's CSS variables replace, so that one SVG fits both themes.
_INK, _GRID = "#010101", "#020202"
_SERIES = tuple(f"#03030{number}" for number in range(8))
_VARIABLES = {_INK: "var(--muted)", _GRID: "var(--grid)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(_SERIES)
}


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: name in the legend.
        x: steps.
        y: values; NaN where a value is missing.
        low, high: bounds of a band around the line; None for no band.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    @property
    def has_values(self) -> bool:
        return any(math.isfinite(value) for value in self.y)


@dataclass(frozen=True)
class Chart:
    """The contents of a chart.

    Attributes:
        title: the heading.
        help: one sentence of explanation.
        lines: lines in drawing order.
        share: values are fractions of 1 and are shown as percentages.
        measured: values are single measurements, drawn as dots; otherwise they are noisy values of
            every step, over which a moving mean is drawn.
        stacked: lines are parts of a total and are stacked.
        logarithmic: the vertical axis is logarithmic.
    """

    title: str
    help: str
    lines: Sequence[Line]
    share: bool = False
    measured: bool = False
    stacked: bool = False
    logarithmic: bool = False


@dataclass(frozen=True)
class RenderedChart:
    """A chart as the page embeds it.

    Attributes:
        chart: the contents.
        svg: the drawing.
        data: values for the readout at the pointer: the horizontal position of the axes in the
            drawing (0 to 1), the range of steps, and the values of the lines.
    """

    chart: Chart
    svg: str
    data: Mapping[str, Any]

    @property
    def has_legend(self) -> bool:
        """Whether a legend is needed: several lines, or one that the title does not name."""
        names = [line["name"].replace("_", " ") for line in self.data["lines"]]
        return len(names) > 1 or names[0].lower() not in self.chart.title.lower()


def draw_chart(chart: Chart) -> RenderedChart:
    """Draw a chart, omitting lines without values."""
    lines = [_downsample(line) for line in chart.lines if line.has_values]
    if not any(value > 0 for line in lines for value in line.y):  # the logarithm of 0 is undefined
        chart = replace(chart, logarithmic=False)
    # Text stays text, to use the page's font; a fixed salt makes the drawing reproducible.
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
        _set_limits(axes, chart, lines)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    left, right = axes.get_xlim()
    box = axes.get_position()
    data = {
        "span": [box.x0, box.x1],
        "steps": [left, right],
        "share": chart.share,
        "lines": [
            {"name": line.name, "x": list(line.x), "y": [_round_or_none(v) for v in line.y]}
            for line in lines
        ],
    }
    return RenderedChart(chart, _apply_theme(buffer.getvalue()), data)


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


def _set_limits(axes: Axes, chart: Chart, lines: Sequence[Line]) -> None:
    steps = [step for line in lines for step in line.x]
    left, right = min(steps, default=0), max(steps, default=1)
    margin = max(0.5, 0.02 * (right - left))
    axes.set_xlim(left - margin, right + margin)
    if chart.share:
        values = [v for line in lines for v in (*line.y, *(line.high or ())) if math.isfinite(v)]
        top = max(values, default=1.0)
        axes.set_ylim(0, 1.03 if top > 0.45 else max(0.05, 1.15 * top))  # room for markers at 1
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
        return
    if chart.logarithmic:
        return
    if axes.get_ylim()[0] >= 0:
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    # Matplotlib would write a common factor outside of the drawing.
    axes.yaxis.set_major_formatter(lambda value, _: format_tick(value, high - low))


def format_tick(value: float, span: float) -> str:
    """Format the label of a tick on an axis of length ``span``, with three significant digits."""
    if abs(value) < 1e-9 * span:
        return "0"  # a rounding error
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{value:.3g}")


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centered mean over ``window`` values, or fewer at the ends and around NaN."""
    kernel = np.ones(window)
    known = np.isfinite(values)
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    counts = np.convolve(known.astype(float), kernel, mode="same")
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _downsample(line: Line) -> Line:
    """Return the line with at most ``MAX_POINTS`` points, by averaging neighbors."""
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


def _apply_theme(svg: str) -> str:
    """Return the ``svg`` element alone, with the colors and the font of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px '[^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1
    )
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg


def _round_or_none(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
