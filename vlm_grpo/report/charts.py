"""The charts of a run, and of a comparison of runs, as data that the page draws (``charts.js``)."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np
import yaml

from vlm_grpo.eval.scored import Scored, is_number
from vlm_grpo.report.gallery import display_text
from vlm_grpo.report.run import Run

MAX_POINTS = 2000  # most points of a line; longer lines are downsampled by averaging
OUTER_PHASES = ("step", "rollout", "evaluation")
"""Phases that contain other phases, or that are not part of a step."""
MAX_SUBSETS = 8  # most lines in a chart of a metric's subsets
DISTRIBUTIONS = {
    "reward": ("Distribution of the reward", "Total reward of the step's completions."),
    "completions/length": (
        "Distribution of the completion length",
        "Length of the step's completions, in tokens.",
    ),
}
"""Titles and explanations of the charts of ``distributions.jsonl``."""


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
class Chart:
    """The contents of a chart."""

    title: str
    help: str
    lines: Sequence[Line]  # in drawing order
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

    @property
    def has_values(self) -> bool:
        return any(line.has_values for line in self.lines)


@dataclass(frozen=True)
class Panel:
    """A chart of metrics that are logged at every step: an item of ``panels.yaml``."""

    title: str
    help: str
    metrics: Sequence[str | Mapping[str, str]]
    words: bool = False
    share: bool = False
    logarithmic: bool = False
    events: bool = False

    def label(self, name: str) -> str | None:
        """Return a metric's name in the legend; None if the panel does not show the metric."""
        for metric in self.metrics:
            patterns = {metric: r"\g<0>"} if isinstance(metric, str) else metric
            for pattern, label in patterns.items():
                if match := re.fullmatch(pattern, name, re.DOTALL):
                    text = match.expand(label)
                    return text.replace("_", " ") if self.words else text
        return None

    def draw(self, lines: Sequence[Line], suffix: str = "") -> Chart:
        if self.events and not any(value > 0 for line in lines for value in line.y):
            lines = ()
        title, scale = self.title + suffix, self.logarithmic
        return Chart(title, self.help, lines, share=self.share, logarithmic=scale)


PANELS = [
    Panel(**panel)
    for panel in yaml.safe_load(
        resources.files("vlm_grpo.report").joinpath("panels.yaml").read_text("utf-8")
    )
]


def build_charts(run: Run) -> list[Chart]:
    """Return the charts of one run that have values."""
    charts = list(_build_held_out_charts([("", run)]))
    names = _get_metric_names(run)
    for panel in PANELS:
        labels = {name: label for name in names if (label := panel.label(name)) is not None}
        lines = [_build_line(label, name, run) for name, label in labels.items()]
        total = [line for line in lines if line.name == "total"]
        parts = [line for line in lines if line.name != "total"]
        if len(parts) == 1 and total and list(parts[0].y) == list(total[0].y):
            total = []  # the only reward is the total
        charts.append(panel.draw([*total, *parts]))
    charts += [*_build_distribution_charts(run), _build_phase_chart(run)]
    return [chart for chart in charts if chart.has_values]


def build_comparison_charts(runs: Sequence[tuple[str, Run]]) -> list[Chart]:
    """Return one chart per metric, with a line per labeled run."""
    charts = list(_build_held_out_charts(runs))
    names = sorted({name for _, run in runs for name in _get_metric_names(run)})
    for panel in PANELS:
        for name in names:
            if (label := panel.label(name)) is not None:
                suffix = "" if label == name else f": {display_text(label, 60)}"
                lines = [_build_line(text, name, run) for text, run in runs]
                charts.append(panel.draw(lines, suffix))
    lines = [_build_line(label, "time/step", run) for label, run in runs]
    charts.append(Chart("Time per step", "In seconds, without evaluation.", lines))
    # A line has the color of its run, whichever runs have values.
    charts = [
        replace(chart, lines=[replace(line, series=i) for i, line in enumerate(chart.lines)])
        for chart in charts
    ]
    return [chart for chart in charts if chart.has_values]


def _build_held_out_charts(runs: Sequence[tuple[str, Run]]) -> Iterator[Chart]:
    """Yield the chart of the primary metric with its interval, then those of the other metrics.

    For a single run, a metric's values on subsets of the examples, such as ``exact_of_3``, share a
    chart.
    """
    primary_metrics = {run.primary_metric for _, run in runs}
    evaluations = [evaluation for _, run in runs for evaluation in run.evaluations]
    names = {name: None for evaluation in evaluations for name in evaluation.names}
    parents = {n: _get_parent_metric(n, evaluations) for n in names if n not in primary_metrics}
    own_chart = [name for name in names if parents.get(name) is None]
    for name in sorted(own_chart, key=lambda name: (name not in primary_metrics, name)):
        own = [e for e in evaluations if name in e.names]
        # Only these have intervals: resampling thousands of examples is slow.
        is_primary = name in primary_metrics or any(name in e.parts for e in own)
        is_corpus = any(name in e.corpus for e in own)
        kind = "Corpus metric of" if is_corpus else "Mean over"
        if is_corpus and any(e.parts and name == e.primary_metric for e in own):
            kind = "Mean of the sources, of"
        sizes = {e.get_n(name): None for e in own}
        n = str(max(sizes)) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
        lines = [_build_held_out_line(label or name, name, run, is_primary) for label, run in runs]
        is_error = any(e.is_error(name) for e in own)
        notes = ", with its 95 % interval" if any(line.low for line in lines) else ""
        notes += "; lower is better" if is_error else ""
        title = f"Held out: {display_text(name, 60).replace('_', ' ')}"
        yield Chart(
            title,
            f"{kind} {n} held-out examples{notes}.",
            lines,
            share=not is_error and (is_primary or not is_corpus) and _is_share(name, evaluations),
            measured=True,
        )
        subsets = [subset for subset, parent in parents.items() if parent == name]
        if subsets and len(runs) == 1:
            labels = {n: n.removeprefix(f"{name}_").replace("_", " ") for n in subsets}
            yield Chart(
                f"{title}, by subset",
                "The metric on subsets of the examples, or by a stricter rule.",
                [_build_held_out_line(labels[n], n, runs[0][1]) for n in subsets[:MAX_SUBSETS]],
                share=all(_is_share(shown, evaluations) for shown in (name, *subsets)),
                measured=True,
            )


def _get_parent_metric(name: str, evaluations: Sequence[Scored]) -> str | None:
    """Return the metric of which a corpus metric is a subset: ``exact`` for ``exact_of_3``."""
    if not any(name in evaluation.corpus for evaluation in evaluations):
        return None
    others = {other for e in evaluations for other in e.names if name.startswith(f"{other}_")}
    return min(others, key=len, default=None)


def _is_share(name: str, evaluations: Sequence[Scored]) -> bool:
    # Means do not suffice: a mean error may be below 1.
    values = [value for e in evaluations for value in e.values.get(name, {}).values()]
    values += [e.corpus[name] for e in evaluations if name in e.corpus]
    return all(0.0 <= value <= 1.0 for value in values)


def _build_held_out_line(label: str, name: str, run: Run, interval: bool = False) -> Line:
    evaluations = [evaluation for evaluation in run.evaluations if name in evaluation.names]
    steps = [evaluation.step for evaluation in evaluations]
    means = [evaluation.metrics[name] for evaluation in evaluations]
    line = Line(display_text(label, 60), steps, means)
    bounds = [e.get_interval(name) for e in evaluations] if interval else []
    if all(math.isnan(low) for low, _ in bounds):
        return line
    return replace(line, low=[low for low, _ in bounds], high=[high for _, high in bounds])


def _build_phase_chart(run: Run) -> Chart:
    names = [name for name in _get_metric_names(run) if name.startswith("time/")]
    outer = {f"time/{phase}" for phase in OUTER_PHASES}
    if "time/generation" in names:  # elsewhere, while the rollout waits or the update runs
        outer = outer - {"time/rollout"} | {"time/generation"}
    inner = [name for name in names if name not in outer]
    lines = [_build_line(name.removeprefix("time/"), name, run) for name in inner]
    if "time/step" in names and lines:
        step = _build_line("other", "time/step", run)
        phases = ([0.0 if math.isnan(v) else v for v in line.y] for line in lines)
        sums = map(sum, zip(*phases, strict=True))
        rest = [max(0.0, total - known) for total, known in zip(step.y, sums, strict=True)]
        lines.append(Line("other", step.x, rest))
    return Chart("Time per step by phase", "In seconds, without evaluation.", lines, stacked=True)


def _build_line(label: str, name: str, run: Run) -> Line:
    values = [row.get(name) for row in run.metrics]
    steps = [row["step"] for row in run.metrics]
    numbers = [float(value) if is_number(value) else math.nan for value in values]
    return Line(display_text(label, 60), steps, numbers)


def _get_metric_names(run: Run) -> list[str]:
    names = {name: None for row in run.metrics for name, value in row.items() if is_number(value)}
    return [name for name in names if name != "step"]


def _build_distribution_charts(run: Run) -> Iterator[Chart]:
    for name, (title, help_) in DISTRIBUTIONS.items():
        known = {}
        for row in run.distributions:
            values = row.get(name)
            if numbers := [*filter(is_number, values if isinstance(values, list) else ())]:
                known[row["step"]] = np.quantile(numbers, [0.9, 0.5, 0.1]).tolist()
        if known:
            lines = zip(("90 %", "median", "10 %"), zip(*known.values(), strict=True), strict=True)
            yield Chart(title, help_, [Line(label, list(known), y) for label, y in lines])


def pack_charts(charts: Sequence[Chart]) -> dict[str, Any]:
    """Return the charts' data for the page; lines without values are omitted.

    Equal horizontal positions are stored once, in ``xs``, to which the lines' ``x`` refers.
    """
    positions: dict[tuple[float, ...], int] = {}
    packed = []
    for chart in charts:
        lines = []
        for number, line in enumerate(line for line in chart.lines if line.has_values):
            x = positions.setdefault(tuple(_downsample(line.x)), len(positions))
            series = number if line.series is None else line.series
            values = {name: _round(getattr(line, name)) for name in ("y", "low", "high")}
            lines.append({**vars(line), "x": x, "series": series, **values})
        packed.append(vars(chart) | {"lines": lines})
    return {"charts": packed, "xs": list(positions)}


def _downsample(values: Sequence[float]) -> Sequence[float]:
    """Return at most ``MAX_POINTS`` values, by averaging neighbors."""
    size = math.ceil(len(values) / MAX_POINTS)
    if size == 1:
        return values
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    known = [[value for value in part if math.isfinite(value)] for part in parts]
    return [sum(part) / len(part) if part else math.nan for part in known]


def _round(values: Sequence[float] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [float(f"{v:.4g}") if math.isfinite(v) else None for v in _downsample(values)]
