"""The metrics of a step, and the log to which a run writes them."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.eval.pass_at_k import estimate_best
from vlm_grpo.task.episodes import count_calls
from vlm_grpo.training.objective.advantages import Advantages
from vlm_grpo.training.objective.token_batch import MetricAccumulator
from vlm_grpo.training.step_batch import Rollout, StepAdvantages
from vlm_grpo.types import Group
from vlm_grpo.utils.atomic_io import append_durable, write_atomic
from vlm_grpo.utils.jsonl import format_rows, read_rows

WIDE = 16  # number of completions per group from which pass@k is estimated
DISTRIBUTION_VALUES = 64
"""Most values that are recorded of a distribution at each step."""


class StepLog:
    """A JSON Lines file with one object per step; the first row creates it and its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def truncate(self, step: int) -> None:
        """Drop the rows of this step and later ones, which will be run again."""
        kept = [row for row in self.read() if row["step"] < step]
        write_atomic(self.path, format_rows(kept))

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_durable(self.path, format_rows([{"step": step, **row}]))

    def read(self) -> list[dict[str, Any]]:
        """Return all rows except a last one that a crash has truncated."""
        return read_rows(self.path) if self.path.is_file() else []


def rollout_metrics(
    rollout: Rollout, advantages: StepAdvantages, metric: str = ""
) -> dict[str, float]:
    """Return the metrics of a rollout over all ranks; none of targets. All ranks must call it."""
    if rollout.author is not None:
        return {}
    own = group_metrics(rollout.groups, rollout.step, metric)
    step, parts = advantages.step, gather_object([own])
    sources = gather_object([group.prompt.example.source for group in rollout.groups])
    return {
        **sum(parts, MetricAccumulator()).values(empty=math.nan),
        **_spread_by_source(step, sources),
        "reward_std": step.group_stds.nanmean().item(),
        "frac_reward_zero_std": step.frac_reward_zero_std,
        "unscorable": step.unscorable,
        "resampled_groups": rollout.resampled,
        **rollout.metrics,
    }


def group_metrics(groups: Sequence[Group], step: int = 0, metric: str = "") -> MetricAccumulator:
    """Return the metrics of one rank's groups, sampled after ``step`` steps; names follow TRL's.
    ``metric`` is the primary one, of which wide groups have pass@k; empty: it is an error.

    An outside sampler does not report entropies; the mean of −log p over sampled tokens estimates
    them without bias. Completions behind another form of their prompt have no part in them.
    """
    completions = [c for group in groups for c in group.completions]
    scores = [s for group in groups for s in group.scores]
    lengths = [len(c.token_ids) for c in completions]
    means = {
        **_common_means(groups),
        "entropy": _sum_and_count(
            value
            for c in (c for c in completions if c.variant is None)
            for value in c.entropies or map(operator.neg, c.logprobs)
        ),
    }
    for source in sorted({group.prompt.example.source for group in groups} - {""}):
        own = _common_means([g for g in groups if g.prompt.example.source == source])
        means |= {f"sources/{source}/{name}": mean for name, mean in own.items()}
    sums, samples = {}, {}
    for name in _get_names(score.rewards for score in scores):
        values = [s.rewards[name] for s in scores if name in s.rewards]
        samples[f"rewards/{name}"] = tuple(value for value in values if value is not None)
        sums[f"rewards/{name}/failed"] = sum(value is None for value in values)
    for name in _get_names(score.metrics for score in scores):
        means[f"metrics/{name}"] = _sum_and_count([s.metrics.get(name) for s in scores])
    for name in {variant[0] for c in completions if (variant := c.variant) is not None}:
        varied = [group for group in groups if group.completions[-1].variant is not None]
        pairs = [p for g in varied for p in zip(g.completions, g.scores, strict=True)]
        means[f"{name}/reward"] = _sum_and_count(s.total for c, s in pairs if c.variant)
        means[f"{name}/clean_reward"] = _sum_and_count(s.total for c, s in pairs if not c.variant)
    episodes = [c for group in groups if group.prompt.start is not None for c in group.completions]
    calls = [count_calls(c.turns) for c in episodes]
    for name in calls[0] if calls else ():
        means[name] = _sum_and_count(own[name] for own in calls)
    if episodes:
        means["completions/turns"] = _sum_and_count(len(c.turns) for c in episodes)
        observed = (sum(len(o.prompt.token_ids) for o in c.observations) for c in episodes)
        means["tokens/observed"] = _sum_and_count(observed)
    means |= _estimate_passes(groups, metric)
    minima = {"completions/min_length": min(lengths)} if lengths else {}
    maxima = {"completions/max_length": max(lengths)} if lengths else {}
    if staleness := [step - c.version for c in completions if c.version is not None]:
        means["staleness/mean"] = _sum_and_count(staleness)
        maxima["staleness/max"] = max(staleness)
    return MetricAccumulator(means, minima, maxima, sums, samples)


def _estimate_passes(groups: Sequence[Group], metric: str) -> dict[str, tuple[float, int]]:
    """Return pass@k of groups of at least ``WIDE`` completions, with k in powers of two."""
    found: dict[str, list[float]] = {}
    for group in groups:
        pairs = zip(group.completions, group.scores, strict=True)
        values = [{**s.rewards, **s.metrics}.get(metric) for c, s in pairs if c.variant is None]
        known = [value for value in values if value is not None]
        for size in (2**power for power in range(len(known).bit_length()) if len(known) >= WIDE):
            found.setdefault(f"pass_at_{size}", []).append(estimate_best(known, size))
    return {name: _sum_and_count(values) for name, values in found.items()}


def _common_means(groups: Sequence[Group]) -> dict[str, tuple[float, int]]:
    completions = [c for group in groups for c in group.completions]
    scores = [s for group in groups for s in group.scores]
    return {
        "reward": _sum_and_count([s.total for s in scores]),
        "completions/mean_length": _sum_and_count([len(c.token_ids) for c in completions]),
        "completions/clipped_ratio": _sum_and_count([c.stop == "length" for c in completions]),
        "completions/answered": _sum_and_count([s.answer is not None for s in scores]),
    }


def _get_names(values: Iterable[Mapping[str, object]]) -> list[str]:
    """Return all names in several mappings; the sources of a mixture have different ones."""
    return list(dict.fromkeys(name for mapping in values for name in mapping))


def _spread_by_source(advantages: Advantages, sources: Sequence[str]) -> dict[str, float]:
    found = {}
    for source in sorted({*sources} - {""}):
        own = torch.tensor([other == source for other in sources])
        stds, equal = advantages.group_stds[own], advantages.zero_spread[own]
        found[f"sources/{source}/reward_std"] = stds.nanmean().item()
        found[f"sources/{source}/frac_reward_zero_std"] = equal.double().mean().item()
    return found


def rollout_distributions(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Return samples of a step's rewards and lengths in tokens. All ranks must call it.

    Each has the values of all ranks' completions in ascending order; of more than 64, evenly spaced
    ones are kept, each of which stands for the same share of the completions.
    """
    rewards = [s.total for group in groups for s in group.scores if s.total is not None]
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    parts = gather_object([(rewards, lengths)])
    names, found = ("reward", "completions/length"), {}
    for name, values in zip(names, zip(*parts, strict=True), strict=True):
        ordered = sorted(value for part in values for value in part)
        count = min(len(ordered), DISTRIBUTION_VALUES)
        kept = (ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count))
        found[name] = [float(f"{value:.4g}") for value in kept]
    return found


def _sum_and_count(values: Iterable[float | None]) -> tuple[float, int]:
    known = [value for value in values if value is not None]
    return sum(known), len(known)
