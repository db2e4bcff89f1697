"""Define the charts of a run, and of a comparison of runs, with their titles and explanations."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vlm_grpo.report.charts import Chart, HeatMap, Line
from vlm_grpo.report.gallery import display_text
from vlm_grpo.report.run import HeldOutEvaluation, Run, is_number

OUTER_PHASES = ("step", "rollout", "evaluation")
"""Phases that contain other phases, or that are not part of a step."""
MAX_SUBSETS = 8
"""Most lines in a chart of a metric's subsets."""
MAX_HEAT_MAPS = 4
"""Most runs in a comparison whose distributions are shown."""


@dataclass(frozen=True)
class Panel:
    """A chart of metrics that are logged at every step.

    Attributes:
        title, help, share, logarithmic: as in ``Chart``.
        matches: returns whether the panel shows the metric of a name.
        label: returns the metric's name in the legend.
    """

    title: str
    help: str
    matches: Callable[[str], bool]
    label: Callable[[str], str] = lambda name: name
    share: bool = False
    logarithmic: bool = False

    def draw(self, lines: Sequence[Line], suffix: str = "") -> Chart:
        title, scale = self.title + suffix, self.logarithmic
        return Chart(title, self.help, lines, share=self.share, logarithmic=scale)


def _is_one_of(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def _get_last_part(name: str) -> str:
    return name.rpartition("/")[2].replace("_", " ")


def _get_reward_name(name: str) -> str:
    return "/".join(name.split("/")[1:-1]) if "/" in name else "total"


def _get_source(name: str) -> str:
    """Return the source in ``sources/SOURCE/METRIC``, in which it may be ``SOURCE/TASK``."""
    return re.sub(r"/(completions/)?\w+$", "", name.removeprefix("sources/"))


PANELS = (
    Panel(
        "Reward",
        "Mean over the step's completions: the weighted total, and each reward before weighting.",
        lambda name: name == "reward" or (name.startswith("rewards/") and name.endswith("/mean")),
        _get_reward_name,
    ),
    Panel(
        "Training metrics",
        "Mean of the task's metrics over the step's sampled completions.",
        lambda name: name.startswith("metrics/"),
        lambda name: name.removeprefix("metrics/").replace("_", " "),
    ),
    Panel(
        "Reward by source",
        "Mean total reward of the completions of each source of a mixture.",
        lambda name: name.startswith("sources/") and name.endswith("/reward"),
        _get_source,
    ),
    Panel(
        "Groups with equal rewards by source",
        "Share of each source's groups whose completions all have the same reward.",
        lambda name: name.startswith("sources/") and name.endswith("/frac_reward_zero_std"),
        _get_source,
        share=True,
    ),
    Panel(
        "Completion length by source",
        "Mean in tokens.",
        lambda name: name.startswith("sources/") and name.endswith("/mean_length"),
        _get_source,
    ),
    Panel(
        "Groups with equal rewards",
        "Share of groups whose completions all have the same reward; they carry no learning "
        "signal. Near 100 %, the task is too easy or too hard for the model.",
        _is_one_of("frac_reward_zero_std"),
        lambda name: "share of groups",
        share=True,
    ),
    Panel(
        "Pass rate of the chosen prompts",
        "What the curriculum expected of them, what was found, and the share without an estimate.",
        lambda name: name.startswith("curriculum/"),
        _get_last_part,
        share=True,
    ),
    Panel(
        "Completion length",
        "In tokens.",
        _is_one_of("completions/mean_length", "completions/min_length", "completions/max_length"),
        lambda name: _get_last_part(name).removesuffix(" length"),
    ),
    Panel(
        "Answered and truncated",
        "Share of completions with a parsed answer, and share that reached the length limit.",
        _is_one_of("completions/answered", "completions/clipped_ratio"),
        lambda name: {"answered": "answered"}.get(_get_last_part(name), "truncated"),
        share=True,
    ),
    Panel(
        "Entropy",
        "In nats per sampled token. Near 0, the policy no longer explores.",
        _is_one_of("entropy"),
    ),
    Panel(
        "KL to the reference",
        "In nats per token: k3 times the importance ratio, for every objective.kl_estimator.",
        lambda name: name == "kl" or name.startswith("kl/"),
    ),
    Panel(
        "Sampler mismatch",
        "Difference between the log-probabilities of the update and of the sampler, in nats. Both "
        "are of the same policy: 1e-3 is bfloat16 rounding, 1e-1 indicates a defect.",
        lambda name: name.startswith("sampling/sampling_logp_difference/"),
        _get_last_part,
        logarithmic=True,
    ),
    Panel(
        "Sampler correction",
        "Weights of the sampler correction, the share of them beyond a bound, the effective sample "
        "size as a share of the completions (or tokens), and how many steps older the sampler's "
        "weights were than the policy.",
        lambda name: name.startswith(("sampling/", "staleness/")) and "logp" not in name,
        lambda name: name.removeprefix("sampling/"),
    ),
    Panel(
        "Clipped ratios",
        "Share of tokens whose importance ratio was clipped; 0 with one update per rollout.",
        lambda name: name.startswith("clip_ratio/"),
        _get_last_part,
        share=True,
    ),
    Panel("Gradient norm", "Before clipping.", _is_one_of("grad_norm"), lambda _: "gradient norm"),
    Panel(
        "Loss",
        "Of a step that samples, near 0 by construction: watch the reward instead. Of a supervised "
        "step, the cross-entropy of the targets, in nats per token.",
        _is_one_of("loss"),
    ),
    Panel(
        "Token accuracy",
        "Of supervised steps: share of the targets' tokens that the policy considers likeliest.",
        _is_one_of("mean_token_accuracy"),
        lambda name: "share of tokens",
        share=True,
    ),
    Panel("Learning rate", "At the end of each step.", _is_one_of("learning_rate")),
    Panel(
        "Tokens per second",
        "Over all devices: completion tokens over the time of the rollout, and prompt and "
        "completion tokens over that of the update and a reference pass.",
        lambda name: name.startswith("speed/") and name.endswith("_per_second"),
        lambda name: name.removeprefix("speed/").partition("_")[0],
    ),
    Panel(
        "Model FLOPs utilization (MFU)",
        "Share of the device's peak rate in matrix products, over the step and over the update.",
        _is_one_of("speed/mfu", "speed/update_mfu"),
        lambda name: "update" if name == "speed/update_mfu" else "step",
        share=True,
    ),
    Panel(
        "Memory",
        "In GiB: resident memory at the end of each step, and the peak of each step on CUDA.",
        lambda name: name.startswith("memory/"),
        _get_last_part,
    ),
    Panel(
        "Skipped and replaced",
        "Completions that could not be scored, groups sampled or trained on again, updates skipped "
        "for a non-finite gradient, and prompts replaced because an image could not be read.",
        _is_one_of(
            *("unscorable", "resampled_groups", "replay/groups"),
            *("skipped_updates", "replaced_prompts"),
        ),
        lambda name: "replayed groups" if name == "replay/groups" else _get_last_part(name),
    ),
)


def build_charts(run: Run) -> list[Chart]:
    """Return the charts of one run that have values."""
    panels = (_build_panel_chart(panel, run) for panel in PANELS)
    distributions = build_distribution_charts(run)
    charts = [*_build_held_out_charts([("", run)]), *panels, *distributions]
    charts.append(_build_phase_chart(run))
    return [chart for chart in charts if _is_informative(chart)]


def build_comparison_charts(runs: Sequence[tuple[str, Run]]) -> list[Chart]:
    """Return one chart per metric, with a line per labeled run, and few runs' distributions."""
    charts = list(_build_held_out_charts(runs))
    names = sorted({name for _, run in runs for name in _get_metric_names(run)})
    for panel in PANELS:
        for name in filter(panel.matches, names):
            lines = [_build_line(label, name, run) for label, run in runs]
            label = panel.label(name)
            suffix = f": {display_text(label, 60)}" if label not in (name, "") else ""
            charts.append(panel.draw(lines, suffix))
    lines = [_build_line(label, "time/step", run) for label, run in runs]
    charts.append(Chart("Time per step", "In seconds, without evaluation.", lines))
    charts = [_number_lines(chart) for chart in charts]
    for number, (label, run) in enumerate(runs[:MAX_HEAT_MAPS]):
        charts += build_distribution_charts(run, number, display_text(label, 60))
    return [chart for chart in charts if _is_informative(chart)]


def _number_lines(chart: Chart) -> Chart:
    """Return the chart with a run's line in the color of the run, whichever runs have values."""
    lines = [replace(line, series=number) for number, line in enumerate(chart.lines)]
    return replace(chart, lines=lines)


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
        # Only the primary metric has intervals: resampling thousands of examples is slow.
        is_primary = name in primary_metrics
        is_corpus = any(name in e.corpus for e in evaluations)
        n = max(len(e.values.get(name, ())) or e.n for e in evaluations)
        is_error = any(e.lower_is_better and e.primary_metric == name for e in evaluations)
        notes = ", with its 95 % interval" if is_primary and not is_corpus else ""
        notes += "; lower is better" if is_error else ""
        title = f"Held out: {display_text(name, 60).replace('_', ' ')}"
        yield Chart(
            title,
            f"{'Corpus metric of' if is_corpus else 'Mean over'} {n} held-out examples{notes}.",
            [
                _build_held_out_line(label or name, name, run, interval=is_primary)
                for label, run in runs
            ],
            share=not is_error and (is_primary or not is_corpus) and _is_share(name, evaluations),
            measured=True,
        )
        subsets = [subset for subset, parent in parents.items() if parent == name]
        if subsets and len(runs) == 1:
            labels = [subset.removeprefix(f"{name}_").replace("_", " ") for subset in subsets]
            lines = [
                _build_held_out_line(label, subset, runs[0][1], interval=False)
                for label, subset in zip(labels, subsets, strict=True)
            ]
            yield Chart(
                f"{title}, by subset",
                "The metric on subsets of the examples, or by a stricter rule.",
                lines[:MAX_SUBSETS],
                share=all(_is_share(shown, evaluations) for shown in (name, *subsets)),
                measured=True,
            )


def _get_parent_metric(name: str, evaluations: Sequence[HeldOutEvaluation]) -> str | None:
    """Return the metric of which a corpus metric is a subset: ``exact`` for ``exact_of_3``."""
    if not any(name in evaluation.corpus for evaluation in evaluations):
        return None
    others = {other for e in evaluations for other in e.names if name.startswith(f"{other}_")}
    return min(others, key=len, default=None)


def _is_share(name: str, evaluations: Sequence[HeldOutEvaluation]) -> bool:
    """Return whether every value of the metric, per example if known, is between 0 and 1."""
    # Means do not suffice: a mean error may be below 1.
    values = [value for e in evaluations for value in e.values.get(name, {}).values()]
    values += [e.corpus[name] for e in evaluations if name in e.corpus]
    return all(0.0 <= value <= 1.0 for value in values)


def _build_held_out_line(label: str, name: str, run: Run, interval: bool) -> Line:
    evaluations = [evaluation for evaluation in run.evaluations if name in evaluation.names]
    steps = [evaluation.step for evaluation in evaluations]
    means = [evaluation.mean(name) for evaluation in evaluations]
    line = Line(display_text(label, 60), steps, means)
    if not interval or not any(name in evaluation.values for evaluation in evaluations):
        return line
    lows, highs = zip(*(e.interval(name, run.seed) for e in evaluations), strict=True)
    return replace(line, low=lows, high=highs)


def _build_panel_chart(panel: Panel, run: Run) -> Chart:
    names = [name for name in _get_metric_names(run) if panel.matches(name)]
    lines = [_build_line(panel.label(name), name, run) for name in names]
    total = [line for line in lines if line.name == "total"]
    parts = [line for line in lines if line.name != "total"]
    if len(parts) == 1 and total and list(parts[0].y) == list(total[0].y):
        total = []  # the only reward is the total
    return panel.draw([*total, *parts])


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
    """Return the names of all metrics with a number at any step, in order of appearance."""
    names = {name: None for row in run.metrics for name, value in row.items() if is_number(value)}
    return [name for name in names if name != "step"]


def _is_informative(chart: Chart) -> bool:
    """Return whether the chart has values; counts of events that never happened do not count."""
    values = [value for line in chart.lines for value in line.y if math.isfinite(value)]
    counts_events = chart.title.startswith(("Skipped", "Clipped"))
    return bool(values) and not (counts_events and not any(values))


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
