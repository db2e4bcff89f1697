"""What a run leaves behind while it goes on: metrics by step, and samples of what it wrote."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlm_grpo.types import Group
from vlm_grpo.utils.atomic_io import append_durable, write_atomic


class MetricsLog:
    """``metrics.jsonl``: one line of numbers for each step.

    Args:
        path: the file.
        resume_at: drop the lines of this step and later ones, which will be run again.
    """

    def __init__(self, path: Path, resume_at: int = 0) -> None:
        self.path = path
        kept = [row for row in self.read() if row["step"] < resume_at]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, b"".join(_line(row) for row in kept))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        append_durable(self.path, _line({"step": step, **metrics}))

    def read(self) -> list[dict[str, Any]]:
        """All lines; a last one cut off by a crash is left out."""
        if not self.path.is_file():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


@dataclass(frozen=True)
class Tally:
    """What is counted over a step's completions; ``a + b`` is the tally of both parts together.

    Attributes:
        means: by name the sum of the values that are defined, and how many they are.
        sums: by name.
        rewards: by name those that could be computed.
        lengths: tokens of the shortest and the longest completion; None without any.
    """

    means: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    sums: Mapping[str, int] = field(default_factory=dict)
    rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    lengths: tuple[int, int] | None = None

    def __add__(self, other: Tally) -> Tally:
        means = dict(self.means)
        for name, (total, count) in other.means.items():
            before = means.get(name, (0.0, 0))
            means[name] = (before[0] + total, before[1] + count)
        sums = dict(self.sums)
        for name, count in other.sums.items():
            sums[name] = sums.get(name, 0) + count
        rewards = dict(self.rewards)
        for name, values in other.rewards.items():
            rewards[name] = rewards.get(name, ()) + values
        lengths = [pair for pair in (self.lengths, other.lengths) if pair is not None]
        if not lengths:
            return Tally(means, sums, rewards)
        ends = (min(low for low, _ in lengths), max(high for _, high in lengths))
        return Tally(means, sums, rewards, ends)

    def values(self) -> dict[str, float]:
        """Every metric as a number; NaN for a mean over nothing, or a deviation of one value."""
        found = {
            name: total / count if count else math.nan
            for name, (total, count) in self.means.items()
        }
        if self.lengths is not None:
            shortest, longest = self.lengths
            found |= {"completions/min_length": shortest, "completions/max_length": longest}
        for name, values in self.rewards.items():
            found[f"rewards/{name}/mean"] = statistics.fmean(values) if values else math.nan
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            found[f"rewards/{name}/std"] = spread
        return {**found, **self.sums}


def step_tally(groups: Sequence[Group]) -> Tally:
    """What a step's groups say of the policy that wrote them; names follow TRL's.

    Means over completions: the reward in all and by name (with its standard deviation), the
    task's metrics, lengths in tokens, the share that was cut off, the share with an answer,
    entropy in nats per token.
    """
    completions = [c for group in groups for c in group.completions]
    scores = [s for group in groups for s in group.scores]
    lengths = [len(c.token_ids) for c in completions]
    means = {
        "reward": _summed([s.total for s in scores]),
        "completions/mean_length": _summed(lengths),
        "completions/clipped_ratio": _summed([c.stop == "length" for c in completions]),
        "completions/answered": _summed([s.answer is not None for s in scores]),
        "entropy": _summed([value for c in completions for value in c.entropies]),
    }
    sums, rewards = {}, {}
    for name in scores[0].rewards if scores else ():
        values = [s.rewards[name] for s in scores]
        rewards[name] = tuple(value for value in values if value is not None)
        sums[f"rewards/{name}/failed"] = sum(value is None for value in values)
    for name in scores[0].metrics if scores else ():
        means[f"metrics/{name}"] = _summed([s.metrics[name] for s in scores])
    return Tally(means, sums, rewards, (min(lengths), max(lengths)) if lengths else None)


def _summed(values: Iterable[float | None]) -> tuple[float, int]:
    """The sum of the values that are defined, and how many they are."""
    known = [value for value in values if value is not None]
    return sum(known), len(known)
