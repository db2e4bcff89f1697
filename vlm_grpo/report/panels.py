"""Which curves a run has, what they are called, and what a reader should know of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vlm_grpo.report.charts import Chart, Line
from vlm_grpo.report.entries import visible
from vlm_grpo.report.run import HeldOut, Run, is_number

OUTER_PHASES = ("step", "rollout", "evaluation")
"""Phases that hold other phases, or that are no part of a step."""
MOST_PARTS = 8
"""Lines of a chart of a metric's parts: as many as there are colours."""


@dataclass(frozen=True)
class Panel:
    """A chart of metrics that a step logs.

    Attributes:
        title, help, share, logarithmic: as of ``Chart``.
        picks: says of a metric's name whether it belongs here.
        label: what the legend calls it.
    """

    title: str
    help: str
    picks: Callable[[str], bool]
    label: Callable[[str], str] = lambda name: name
    share: bool = False
    logarithmic: bool = False


def _named(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def _last(name: str) -> str:
    return name.rpartition("/")[2].replace("_", " ")


def _reward(name: str) -> str:
    return name.split("/")[1] if "/" in name else "total"


PANELS = (
    Panel(
        "Reward",
        "Mean over a step's completions: the weighted total, and each reward before weighting.",
        lambda name: name == "reward" or (name.startswith("rewards/") and name.endswith("/mean")),
        _reward,
    ),
    Panel(
        "Metrics while training",
        "The task's metrics of sampled completions, which are less sure than greedy answers.",
        lambda name: name.startswith("metrics/"),
        _last,
    ),
    Panel(
        "Groups without a spread",
        "Share of groups whose rewards are all equal: they teach nothing. Near 100 %: the task is "
        "too easy or too hard for the model.",
        _named("frac_reward_zero_std"),
        lambda name: "share of groups",
        share=True,
    ),
    Panel(
        "Completion length",
        "Tokens of a completion.",
        _named("completions/mean_length", "completions/min_length", "completions/max_length"),
        lambda name: _last(name).removesuffix(" length"),
    ),
    Panel(
        "Answered and cut off",
        "Share of completions that hold an answer, and that reached the length limit.",
        _named("completions/answered", "completions/clipped_ratio"),
        lambda name: {"answered": "answered"}.get(_last(name), "cut off"),
        share=True,
    ),
    Panel(
        "Entropy",
        "Nats per sampled token. Falling to 0: the policy no longer tries anything.",
        _named("entropy"),
    ),
    Panel(
        "KL to the reference",
        "Nats per token, by the estimator of the settings.",
        lambda name: name == "kl" or name.startswith("kl/"),
    ),
    Panel(
        "Sampler mismatch",
        "How far the log-probs of the update are from those of the sampler, in nats. Both should "
        "be the same policy: 1e-3 is rounding in bfloat16, 1e-1 a defect.",
        lambda name: name.startswith("sampling/"),
        _last,
        logarithmic=True,
    ),
    Panel(
        "Clipped",
        "Share of tokens whose importance ratio was clipped; 0 with one update per rollout.",
        lambda name: name.startswith("clip_ratio/"),
        _last,
        share=True,
    ),
    Panel("Gradient norm", "Before it is clipped.", _named("grad_norm"), lambda _: "gradient norm"),
    Panel("Loss", "Near 0 by construction: watch the reward.", _named("loss")),
    Panel("Learning rate", "At the end of the step.", _named("learning_rate")),
    Panel(
        "Memory",
        "GiB: what the process held at the end of a step, and a step's peak on CUDA.",
        lambda name: name.startswith("memory/"),
        _last,
    ),
    Panel(
        "Left out and made up for",
        "Completions that no reward could score, groups that were sampled again, updates skipped "
        "because the gradient was not finite, prompts replaced because an image could not be read.",
        lambda name: (
            name in ("unscorable", "resampled_groups", "skipped_updates", "replaced_prompts")
        ),
        _last,
    ),
)


def charts(run: Run) -> list[Chart]:
    """The charts of one run; those without a value are left out."""
    found = [*_held_out([("", run)]), *(_chart(panel, run) for panel in PANELS), _phases(run)]
    return [chart for chart in found if _says_something(chart)]


def comparison(runs: Sequence[tuple[str, Run]]) -> list[Chart]:
    """For each metric one chart, a line in it for each labelled run."""
    found = list(_held_out(runs))
    names = sorted({name for _, run in runs for name in _numbers(run)})
    for panel in PANELS:
        for name in filter(panel.picks, names):
            lines = [_line(label, name, run) for label, run in runs]
            label = panel.label(name)
            title = panel.title if label in (name, "") else f"{panel.title}: {visible(label, 60)}"
            found.append(
                Chart(title, panel.help, lines, share=panel.share, logarithmic=panel.logarithmic)
            )
    lines = [_line(label, "time/step", run) for label, run in runs]
    found.append(Chart("Time of a step", "Seconds, without evaluation.", lines))
    return [chart for chart in found if _says_something(chart)]


def _held_out(runs: Sequence[tuple[str, Run]]) -> Iterator[Chart]:
    """The primary metric with its interval, then every other metric of the held-out examples;
    what a
    metric comes to on parts of them, as ``exact_of_3``, is in one chart, and of one run alone."""
    primary_metrics = {run.primary_metric for _, run in runs}
    found = [evaluation for _, run in runs for evaluation in run.evaluations]
    names = {name: None for evaluation in found for name in evaluation.names}
    parts = {name: _corpus_value(name, found) for name in names if name not in primary_metrics}
    alone = [name for name in names if parts.get(name) is None]
    n = max((evaluation.n for evaluation in found), default=0)
    for name in sorted(alone, key=lambda name: (name not in primary_metrics, name)):
        # Intervals of the primary metric alone: resampling thousands of examples takes its time.
        first = name in primary_metrics
        whole = any(name in e.whole for e in found)
        error = any(e.lower_is_better and e.primary_metric == name for e in found)
        notes = ", with its 95 % interval" if first and not whole else ""
        notes += "; less is better" if error else ""
        yield Chart(
            f"Held out: {visible(name, 60).replace('_', ' ')}",
            f"{'Of the whole of' if whole else 'Mean over'} {n} held-out examples{notes}.",
            [_evaluated(label or name, name, run, interval=first) for label, run in runs],
            share=not error and (first or not whole) and _shares(name, found),
            measured=True,
        )
        pieces = [part for part, of in parts.items() if of == name] if len(runs) == 1 else []
        if pieces:
            labels = [part.removeprefix(f"{name}_").replace("_", " ") for part in pieces]
            lines = [
                _evaluated(label, part, runs[0][1], interval=False)
                for label, part in zip(labels, pieces, strict=True)
            ]
            yield Chart(
                f"Held out: {visible(name, 60).replace('_', ' ')}, by part",
                "The same of some of the examples, or by a stricter rule.",
                lines[:MOST_PARTS],
                share=_shares(name, found) and all(_shares(part, found) for part in pieces),
                measured=True,
            )


def _corpus_value(name: str, found: Sequence[HeldOut]) -> str | None:
    """The metric of whose parts one is: ``exact`` of ``exact_of_3``; None: of none."""
    if not any(name in evaluation.whole for evaluation in found):
        return None
    others = {other for e in found for other in e.names if name.startswith(f"{other}_")}
    return min(others, key=len, default=None)


def _shares(name: str, found: Sequence[HeldOut]) -> bool:
    """Whether all its values, of each example where they are known, lie between 0 and 1."""
    # A mean error below 1 is no share.
    values = [value for e in found for value in e.values.get(name, {}).values()]
    values += [e.whole[name] for e in found if name in e.whole]
    return all(0.0 <= value <= 1.0 for value in values)


def _evaluated(label: str, name: str, run: Run, interval: bool) -> Line:
    found = [evaluation for evaluation in run.evaluations if name in evaluation.names]
    steps = [evaluation.step for evaluation in found]
    line = Line(visible(label, 60), steps, [evaluation.mean(name) for evaluation in found])
    if not interval or not any(name in evaluation.values for evaluation in found):
        return line
    lows, highs = zip(*(e.interval(name, run.seed) for e in found), strict=True)
    return replace(line, low=lows, high=highs)


def _chart(panel: Panel, run: Run) -> Chart:
    names = [name for name in _numbers(run) if panel.picks(name)]
    lines = [_line(panel.label(name), name, run) for name in names]
    total = [line for line in lines if line.name == "total"]
    parts = [line for line in lines if line.name != "total"]
    if len(parts) == 1 and total and list(parts[0].y) == list(total[0].y):
        total = []  # the only reward is the total
    return Chart(
        panel.title,
        panel.help,
        [*total, *parts],
        share=panel.share,
        logarithmic=panel.logarithmic,
    )


def _phases(run: Run) -> Chart:
    """A step's seconds by phase, phase upon phase."""
    names = [name for name in _numbers(run) if name.startswith("time/")]
    inner = [name for name in names if name.removeprefix("time/") not in OUTER_PHASES]
    lines = [_line(name.removeprefix("time/"), name, run) for name in inner]
    if "time/step" in names and lines:
        total = _line("other", "time/step", run)
        parts = zip(*([0.0 if math.isnan(v) else v for v in line.y] for line in lines), strict=True)
        rest = [max(0.0, all_ - sum(part)) for all_, part in zip(total.y, parts, strict=True)]
        lines.append(Line("other", total.x, rest))
    return Chart("Time of a step by phase", "Seconds, without evaluation.", lines, stacked=True)


def _line(label: str, name: str, run: Run) -> Line:
    values = [row.get(name) for row in run.metrics]
    steps = [row["step"] for row in run.metrics]
    return Line(visible(label, 60), steps, [float(v) if is_number(v) else math.nan for v in values])


def _numbers(run: Run) -> list[str]:
    """Names of all metrics that are a number at some step, in the order of their appearance."""
    names = {name: None for row in run.metrics for name, value in row.items() if is_number(value)}
    return [name for name in names if name != "step"]


def _says_something(chart: Chart) -> bool:
    """Whether there is a value; counts of mishaps that never happened need no chart."""
    known = [value for line in chart.lines for value in line.y if math.isfinite(value)]
    mishaps = chart.title.startswith(("Left out", "Clipped"))
    return bool(known) and not (mishaps and not any(known))
