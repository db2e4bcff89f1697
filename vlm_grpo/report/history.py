"""The part of a run's metrics that its alarms read."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 20
"""Number of steps averaged; a single step of a few hundred completions is too noisy."""
SHORT = 5
"""Number of steps averaged for conditions that are never normal, to ignore single outliers."""

Row = Mapping[str, object]


@dataclass(frozen=True)
class AlarmContext:
    """The facts about a run that the rules need besides its metrics.

    Attributes:
        weights: weights of the task's rewards by name.
        primary_metric: name of the reward or metric that compares models.
        completions: number of completions per step.
        lower_is_better: True if the primary metric is an error.
        truncates: True if the sampler excludes tokens that the trainer scores (``rollout.top_p``).
        recipe: the run's settings, for the commands of a remedy.
    """

    weights: Mapping[str, float]
    primary_metric: str
    completions: int
    lower_is_better: bool = False
    truncates: bool = False
    recipe: str = "RECIPE"


@dataclass
class History:
    """The part of the metrics that the rules read, of constant size.

    Attributes:
        context: the facts about the run.
        first: the first ``WINDOW`` rows.
        last: the last ``WINDOW`` rows.
        peak: means over the ``WINDOW`` steps in which the primary metric was best: the rewards by
            name, and the primary metric under "primary_metric".
    """

    context: AlarmContext
    first: list[Row] = field(default_factory=list)
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    peak: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.last.append(row)
        if len(self.last) < WINDOW:
            return
        primary_metric = self.primary_metric
        if math.isfinite(primary_metric) and not self.worse_than_peak() >= 0.0:
            rewards = {name: self.recent(f"rewards/{name}/mean") for name in self.context.weights}
            self.peak = {**rewards, "primary_metric": primary_metric}

    def worse_than_peak(self) -> float:
        """Return the primary metric's decline from its best mean; NaN before the first mean."""
        fall = self.peak.get("primary_metric", math.nan) - self.primary_metric
        return -fall if self.context.lower_is_better else fall

    def recent(self, name: str, steps: int = WINDOW) -> float:
        """Return the mean over the last ``steps`` rows; NaN if fewer than half have a value."""
        return mean_of(list(self.last)[-steps:], name, (steps + 1) // 2)

    def start(self, name: str) -> float:
        """Return the mean over the first ``WINDOW`` rows; NaN if fewer than half have a value."""
        return mean_of(self.first, name, WINDOW // 2)

    @property
    def primary_metric(self) -> float:
        """The recent mean of the primary metric over the sampled completions."""
        name = self.context.primary_metric
        reward = self.recent(f"rewards/{name}/mean")
        return self.recent(f"metrics/{name}") if math.isnan(reward) else reward


def mean_of(rows: Sequence[Row], name: str, least: int) -> float:
    """Return the mean of a metric over the rows; NaN if fewer than ``least`` have a value."""
    values = [row.get(name) for row in rows]
    known = [float(v) for v in values if isinstance(v, int | float) and not math.isnan(v)]
    return sum(known) / len(known) if len(known) >= least else math.nan
