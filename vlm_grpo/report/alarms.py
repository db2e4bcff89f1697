"""Alarms over a run's metrics, for failures that leave every metric finite.

An alarm is raised once when its condition begins, and again only after the condition has clearly
ended; ``alarms.yaml`` has its thresholds and its texts. The state depends only on the rows so far,
so a resumed run replays its earlier rows and continues exactly as if it had not been interrupted.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from statistics import fmean, stdev
from typing import Any

import yaml

WINDOW = 20  # number of steps averaged; a single step of a few hundred completions is too noisy
SHORT = 5
"""Number of steps averaged for conditions that are never normal, to ignore single outliers."""

Row = Mapping[str, object]

_TABLE: dict[str, dict[str, Any]] = yaml.safe_load(
    resources.files("vlm_grpo.report").joinpath("alarms.yaml").read_text("utf-8")
)


@dataclass
class AlarmMonitor:
    """A monitor that raises alarms from the metrics of successive steps; of constant size.

    ``active`` has the names of the alarms that were raised and are not over.
    """

    weights: Mapping[str, float]
    metric: str  # name of the primary metric
    completions: int  # number of completions per step
    lower_is_better: bool = False  # True if the primary metric is an error
    # True if the sampler excludes tokens that the trainer scores (``rollout.top_p``)
    truncates: bool = False
    recipe: str = "RECIPE"  # the run's settings, for the commands of a remedy

    active: set[str] = field(default_factory=set, init=False)
    first: list[Row] = field(default_factory=list, init=False)
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW), init=False)
    # The primary metric on the held-out examples: before the first rollout, and the last one.
    held_out_before: float = field(default=math.nan, init=False)
    held_out: float = field(default=math.nan, init=False)
    # Highest mean of the primary metric over ``SHORT`` steps, or in the first.
    best: float = field(default=0.0, init=False)
    # Means over the ``WINDOW`` steps in which the primary metric was best: the rewards by name, and
    # the primary metric under "".
    peak: dict[str, float] = field(default_factory=dict, init=False)

    def update(self, row: Row) -> list[dict[str, str]]:
        """Add a step's metrics; return name, message and remedy of the alarms that they begin."""
        is_supervised = "mean_token_accuracy" in row
        self.add_held_out(row.get(f"eval/{self.metric}"), is_first=is_supervised)
        if is_supervised:
            return []
        self._add(row)
        alarms = []
        for name, condition in CONDITIONS.items():
            texts, (severity, values) = _TABLE[name], condition(self)
            if name in self.active and severity < texts["clears"]:
                self.active.discard(name)
            elif name not in self.active and severity >= texts["raises"]:
                self.active.add(name)
                known = {"severity": severity, "metric": self.metric, "first": len(self.first)}
                windows = {"window": self.window(), "short_window": self.window(SHORT)}
                message = texts["message"].format(**known, **windows, **values)
                remedy = texts["remedy"].replace("RECIPE", self.recipe)
                alarms.append({"name": name, "message": message, "remedy": remedy})
        return alarms

    def add_held_out(self, value: object, is_first: bool) -> None:
        """Add the primary metric on the held-out examples; ``is_first``: before the rollouts."""
        if isinstance(value, int | float):
            self.held_out = float(value)
            if is_first or math.isnan(self.held_out_before):
                self.held_out_before = self.held_out

    def _add(self, row: Row) -> None:
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.last.append(row)
        # One step of few completions may be good by chance.
        is_enough = len(self.last) >= SHORT or self.completions >= 64
        recent = self.get_primary(self.recent, 1 if len(self.last) == 1 else SHORT)
        if is_enough and recent > self.best:
            self.best = recent
        if len(self.last) < WINDOW or not math.isfinite(self.primary):
            return
        if not self.worse_than_peak() >= 0.0:  # also before the first peak, where it is NaN
            self.peak = {name: self.reward(name) for name in self.weights} | {"": self.primary}

    def worse_than_peak(self) -> float:
        """Return the primary metric's decline from its best mean; NaN before the first mean."""
        fall = self.peak.get("", math.nan) - self.primary
        return -fall if self.lower_is_better else fall

    def recent(self, name: str, steps: int = WINDOW) -> float:
        """Return the mean over the last ``steps`` rows; NaN if fewer than half have a value."""
        return _mean([*self.last][-steps:], name, (steps + 1) // 2)

    def start(self, name: str) -> float:
        """Return the mean over the first ``WINDOW`` rows; NaN if fewer than half have a value."""
        return _mean(self.first, name, WINDOW // 2)

    def window(self, steps: int = WINDOW) -> str:
        """Describe the rows of ``recent``."""
        return f"the last {min(steps, len(self.last))} steps"

    @property
    def highest_reward(self) -> float:
        """The reward of a completion that earns 1 of each."""
        return sum(weight for weight in self.weights.values() if weight > 0)

    def reward(self, name: str) -> float:
        return self.recent(f"rewards/{name}/mean")

    @property
    def primary(self) -> float:
        """The recent mean of the primary metric over the sampled completions."""
        return self.get_primary(self.recent)

    def get_primary(self, mean: Callable[..., float], *steps: int) -> float:
        """Return a mean, such as ``start``, of the primary metric over the sampled completions."""
        reward = mean(f"rewards/{self.metric}/mean", *steps)
        return mean(f"metrics/{self.metric}", *steps) if math.isnan(reward) else reward


def _mean(rows: Sequence[Row], name: str, least: int) -> float:
    """Return the mean of a metric over the rows; NaN if fewer than ``least`` have a value."""
    values = [row.get(name) for row in rows]
    known = [float(v) for v in values if isinstance(v, int | float) and not math.isnan(v)]
    return sum(known) / len(known) if len(known) >= least else math.nan


Condition = tuple[float, dict[str, Any]]
"""The severity of a condition, NaN if it is unknown, and what its message names."""


def _find_collapse(run: AlarmMonitor) -> Condition:
    """Return the share of its best that the primary metric has lost; 0 if it was never earned."""
    if run.lower_is_better or run.best < 0.1:
        return 0.0, {}
    now = run.get_primary(run.recent, SHORT)
    rates = [_mean([row], "learning_rate", 1) for row in (*run.first, *run.last)]
    highest = max((rate for rate in rates if not math.isnan(rate)), default=None)
    at = "" if highest is None else f", after learning rates of up to {highest:.3g} (optim.lr)"
    return 1 - now / run.best, {"best": run.best, "now": now, "at": at}


def _find_misrewarded(run: AlarmMonitor) -> Condition:
    """Return the gap between the reward, as a share of its maximum, and the held-out primary
    metric; 0 if that is overfitting."""
    highest = run.highest_reward or math.nan
    gap, values = _find_gap(run, lambda mean, *steps: mean("reward", *steps) / highest)
    # Above its maximum a reward has another scale, of which nothing is known.
    return (0.0 if "overfitting" in run.active or values.get("now", 0) > 1 else gap), values


def _find_gap(run: AlarmMonitor, measure: Callable[..., float]) -> Condition:
    """Return by how much a value of training exceeds the primary metric on held-out examples, or
    how much this has grown if that is less; NaN in a step without an evaluation.

    It is larger from the beginning if the held-out examples are harder, and what sampled
    completions earn rises as they become more certain, which is no gap. Neither is a collapse, of
    which the mean over ``WINDOW`` steps knows later than the evaluation."""
    if f"eval/{run.metric}" not in run.last[-1] or run.lower_is_better:
        return math.nan, {}
    start, now = measure(run.start), measure(run.recent)
    held_out, before = run.held_out, run.held_out_before
    growth = now - start - (held_out - before)
    values = {"start": start, "now": now, "held_out": held_out, "before": before}
    return min(growth, now - held_out, measure(run.recent, SHORT) - held_out), values


def _find_unrewarded(run: AlarmMonitor) -> Condition:
    """Return the share of groups with equal rewards if these are near 0; 0 otherwise."""
    reward = run.recent("reward", SHORT)
    is_low = reward < 0.1 * run.highest_reward and not _has_collapsed(run)
    count = min(SHORT, len(run.last)) * run.completions
    answered = run.recent("completions/answered", SHORT)
    share = run.recent("frac_reward_zero_std", SHORT) if is_low else 0.0
    return share, {"reward": reward, "count": count, "answered": answered}


def _find_equal_rewards(run: AlarmMonitor) -> Condition:
    """Return the share of groups with equal rewards; 0 if that is because none earn any."""
    if _find_unrewarded(run)[0] >= 1.0 or _has_collapsed(run):
        return 0.0, {}
    last = f", {run.metric} on held-out examples was {run.held_out:.2f} last"
    known = "" if math.isnan(run.held_out) else last
    return run.recent("frac_reward_zero_std"), {"reward": run.recent("reward"), "known": known}


def _has_collapsed(run: AlarmMonitor) -> bool:
    return _find_collapse(run)[0] >= 0.5


def _find_drift(run: AlarmMonitor) -> Condition:
    """Return the factor by which completions became longer or shorter; 1 for a few tokens."""
    now, before = (mean("completions/mean_length") for mean in (run.recent, run.start))
    factor = 1.0
    if abs(now - before) >= 16:  # a doubling of three tokens is no drift; neither is NaN
        factor = max(now / max(before, 1.0), before / max(now, 1.0))
    return factor, {"now": now, "before": before}


def _find_certainty(run: AlarmMonitor) -> Condition:
    """Return the lowest healthy entropy divided by the recent one."""
    now, before = run.recent("entropy"), run.start("entropy")
    return max(0.01, 0.05 * before) / max(now, 1e-9), {"now": now, "before": before}


def _find_dominance(run: AlarmMonitor) -> Condition:
    """Return the largest share of a reward in the spread that determines the advantages.

    It is 0 if all other rewards are mostly earned: a reward near 1 has no spread left because it is
    learned. Penalties are never above 0, and have no spread if nothing is wrong.
    """
    weights = {name: weight for name, weight in run.weights.items() if weight}
    stds = {name: abs(w) * run.recent(f"rewards/{name}/std") for name, w in weights.items()}
    total = sum(stds.values())
    if len(stds) < 2 or not total > 0:
        return math.nan, {}
    leader = max(stds, key=lambda name: stds[name])
    others = [name for name in stds if name != leader]
    is_unearned = any(weights[n] > 0 and 0.0 <= run.reward(n) < 0.5 for n in others)
    share = stds[leader] / total if is_unearned else 0.0
    return share, {"leader": leader, "others": ", ".join(others)}


def _find_divergence(run: AlarmMonitor) -> Condition:
    """Return the primary metric's fall from its best if another reward has risen since, else 0."""
    risen = [
        other
        for other, weight in run.weights.items()
        if weight > 0
        and other != run.metric
        and run.reward(other) - run.peak.get(other, math.nan) >= 0.05
    ]
    values = {"peak": run.peak.get(""), "now": run.primary, "risen": ", ".join(risen)}
    return (run.worse_than_peak() if risen else 0.0), values


def _find_mismatch(run: AlarmMonitor) -> Condition:
    """Return the mean difference of log-probs of fresh completions; NaN if it is intended."""
    last = run.last[-1]
    is_outside = "staleness/max" in last and not run.truncates
    if "sampling/importance_sampling_ratio/mean" in last and not is_outside:
        return math.nan, {}
    fresh = [row for row in run.last if not row.get("staleness/max")]
    least = (SHORT + 1) // 2 if len(fresh) == len(run.last) else 1
    difference = _mean(fresh[-SHORT:], "sampling/sampling_logp_difference/mean", least)
    return difference, {"fresh": len(fresh[-SHORT:])}


def _find_failures(run: AlarmMonitor) -> Condition:
    """Return the largest share of completions on which a reward failed."""
    counts = {name: run.recent(f"rewards/{name}/failed", SHORT) for name in run.weights}
    known = [(count, name) for name, count in counts.items() if not math.isnan(count)]
    count, name = max(known, default=(math.nan, ""))
    return count / run.completions, {"name": name}


def _find_unused(run: AlarmMonitor) -> Condition:
    """Return the share of the calls of tools that are no longer made; 0 if there were few."""
    now, before = (run.recent("tools/calls", SHORT), run.recent("tools/calls"))
    before = max(before, 0.0 if math.isnan(first := run.start("tools/calls")) else first)
    return (1 - now / before if before >= 0.05 else 0.0), {"before": before}


def _find_shortcut(run: AlarmMonitor) -> Condition:
    """Return by how many standard errors the mean gain of right answers on wrong ones without the
    object is above 0 in recent steps."""
    name = "visual_credit/gain_without_object"
    known = [value for row in run.last if isinstance(value := row.get(name), float)]
    known = known[-WINDOW // 2 :]  # a step whose rewards are equal has none
    if len(known) < WINDOW // 2 or not (error := stdev(known) / len(known) ** 0.5):
        return math.nan, {}
    return fmean(known) / error, {"gain": fmean(known), "recent": run.window(WINDOW // 2)}


CONDITIONS: dict[str, Callable[[AlarmMonitor], Condition]] = {
    "collapse": _find_collapse,
    "overfitting": lambda run: _find_gap(run, run.get_primary),
    "reward without accuracy": _find_misrewarded,
    "groups without a reward": _find_unrewarded,
    "groups without a spread": _find_equal_rewards,
    "length drift": _find_drift,
    "cut off": lambda run: (run.recent("completions/clipped_ratio"), {}),
    "entropy collapse": _find_certainty,
    "KL blow-up": lambda run: (run.recent("kl", SHORT), {}),
    "one reward dominates": _find_dominance,
    "rewards diverge": _find_divergence,
    "sampler mismatch": _find_mismatch,
    "reward fails": _find_failures,
    "no calls": _find_unused,
    "calls fail": lambda run: (run.recent("tools/errors", SHORT), {}),
    "shortcut": _find_shortcut,
}
"""The condition of each alarm of ``alarms.yaml``."""
