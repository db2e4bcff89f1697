"""What an evaluation came to: official metric, interval, tables by group, baselines, comparisons.

Pure functions of examples and scores; no model is known here, so the predictions of any model are
scored the same way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlm_grpo.benchmarks import Benchmark, get_group
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.types import Example, Score

RESAMPLES = 2000
_AT_ONCE = 2_000_000
"""Resampled values in memory at once."""
_GROUPS_SHOWN = 40


@dataclass(frozen=True)
class GroupRow:
    """One line of a table: n examples of a group, their mean and its 95 % interval."""

    group: str
    n: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Two sets of outputs on the same examples, first minus second.

    Attributes:
        n: examples that both have a value for.
        difference: mean of the differences, in the metric's own unit.
        low, high: 95 % bootstrap interval of the difference.
        p_value: how often a difference this far from 0 comes about where there is none.
        better, worse: on how many examples the first did better, and worse.
    """

    n: int
    difference: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int


@dataclass(frozen=True)
class Report:
    """An evaluation on a benchmark.

    Attributes:
        benchmark: what was evaluated on.
        n: examples.
        value: the official metric, on the benchmark's scale.
        interval: its 95 % bootstrap interval; None for a metric of the whole set.
        metrics: every metric by name, in its own unit.
        values: the official metric of each example, None where it is undefined without an
            answer; None for a metric of the whole set.
        tables: for each of the benchmark's groupings its groups.
        baseline: what the naive answer is called, and the official metric that it earns.
        answered: share of outputs that hold an answer.
    """

    benchmark: Benchmark
    n: int
    value: float
    interval: tuple[float, float] | None
    metrics: Mapping[str, float]
    values: tuple[float | None, ...] | None
    tables: Mapping[str, Sequence[GroupRow]]
    baseline: tuple[str, float] | None
    answered: float


def build_report(
    benchmark: Benchmark,
    task: Task,
    examples: Sequence[Example],
    scores: Sequence[Score],
    seed: int = 0,
) -> Report:
    """Score outputs by a benchmark's definition.

    Args:
        benchmark: says the metric, its variants and the groups.
        task: the task that scored the outputs, with its frame.
        examples: the rows, with the ``seen`` sizes that the model had.
        scores: what ``task.score`` made of each output.
        seed: the bootstrap's.
    """
    columns, corpus = _metrics(benchmark, task, examples, scores)
    values = columns.get(benchmark.metric)
    interval = None
    tables = {}
    if values is None:
        value = corpus[benchmark.metric]
    else:
        value = _mean(values) if benchmark.average == "examples" else corpus[benchmark.metric]
        low, high = bootstrap_interval(_split(values, _strata(benchmark, examples)), seed)
        interval = (low * benchmark.scale, high * benchmark.scale)
        for name in benchmark.groups:
            groups = [get_group(name, example) for example in examples]
            tables[name] = group_table(values, groups, seed)
    return Report(
        benchmark=benchmark,
        n=len(examples),
        value=value * benchmark.scale,
        interval=interval,
        metrics={name: _mean(column) for name, column in columns.items()} | corpus,
        values=None if values is None else tuple(values),
        tables=tables,
        baseline=_baseline(benchmark, task, examples),
        answered=float(np.mean([score.answer is not None for score in scores])),
    )


def _metrics(
    benchmark: Benchmark, task: Task, examples: Sequence[Example], scores: Sequence[Score]
) -> tuple[dict[str, list[float | None]], dict[str, float]]:
    """The benchmark's metrics: those of each example, and those of the whole set.

    A metric that is undefined without an answer (a count's error) is None there, so the official
    metric of such a benchmark is over the answered ones.

    Raises:
        UserError: a metric raised, or the official one is defined nowhere.
    """
    own = task.corpus_metrics([score.answer for score in scores], examples)
    columns: dict[str, list[float | None]] = {}
    corpus: dict[str, float] = {}
    for name in (benchmark.metric, *benchmark.variants):
        for example, score in zip(examples, scores, strict=True):
            if name in score.failures:
                reason = score.failures[name].strip().splitlines()[-1]
                raise UserError(f"{name} of example {example.id} cannot be computed: {reason}")
        if name in own:
            corpus[name] = own[name]
        found = [{**score.rewards, **score.metrics}.get(name) for score in scores]
        if any(value is not None for value in found):
            columns[name] = found
    if benchmark.metric not in columns and benchmark.metric not in corpus:
        raise UserError(
            f"{benchmark.metric} of {benchmark.title} is undefined here: no output holds an "
            "answer, or the data hold nothing to find"
        )
    return columns, corpus


def _mean(values: Sequence[float | None]) -> float:
    """Of those that are defined, of which there is one."""
    return float(np.mean([value for value in values if value is not None]))


def _strata(benchmark: Benchmark, examples: Sequence[Example]) -> list[str]:
    if benchmark.average == "groups":
        return [get_group(benchmark.groups[0], example) for example in examples]
    return [""] * len(examples)


def _split(values: Sequence[float | None], strata: Sequence[str]) -> list[np.ndarray]:
    found: dict[str, list[float]] = defaultdict(list)
    for value, stratum in zip(values, strata, strict=True):
        if value is not None:
            found[stratum].append(value)
    return [np.asarray(part, float) for part in found.values()]


def bootstrap_interval(parts: Sequence[np.ndarray], seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of the parts' means.

    Each part is resampled within itself; with one part it is the usual interval of a mean.

    Args:
        parts: values of each part, (n_part,) each, none of them empty.
        seed: of the resampling.
    """
    means = np.mean([_resampled_means(part, seed + i) for i, part in enumerate(parts)], axis=0)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Means of RESAMPLES resamples, (RESAMPLES,)."""
    rng = np.random.default_rng(seed)
    n, chunk = len(values), max(1, _AT_ONCE // len(values))
    sizes = [min(chunk, RESAMPLES - start) for start in range(0, RESAMPLES, chunk)]
    return np.concatenate([values[rng.integers(0, n, (k, n))].mean(axis=1) for k in sizes])


def group_table(
    values: Sequence[float | None], groups: Sequence[str], seed: int = 0
) -> tuple[GroupRow, ...]:
    """Mean, n and interval of every group, in natural order (numbers by size)."""
    found: dict[str, list[float]] = defaultdict(list)
    for value, group in zip(values, groups, strict=True):
        if value is not None:
            found[group].append(value)
    rows = []
    for group in sorted(found, key=_natural):
        part = np.asarray(found[group], float)
        rows.append(
            GroupRow(group, len(part), float(part.mean()), *bootstrap_interval([part], seed))
        )
    return tuple(rows)


def _natural(group: str) -> tuple[int, float, str]:
    return (0, float(group), "") if group.isdecimal() else (1, 0.0, group)


def compare(
    first: Sequence[float | None],
    second: Sequence[float | None],
    seed: int = 0,
    lower_is_better: bool = False,
) -> Comparison:
    """A paired bootstrap test on the differences of two outputs to the same examples.

    The p-value is the share of resamples, of the differences shifted to mean 0, whose mean is at
    least as far from 0 as the one seen; one is added to both counts, so it is never 0.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 16.4.

    Args:
        first, second: the metric of each example, in the same order; examples for which either
            has none are left out.
        seed: of the resampling.
        lower_is_better: the metric is an error.

    Raises:
        UserError: no example has both.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        raise UserError("there is nothing to compare: no example is answered by both")
    differences = np.asarray([a - b for a, b in pairs], float)
    mean = float(differences.mean())
    resampled = _resampled_means(differences, seed)
    low, high = np.percentile(resampled, (2.5, 97.5))
    # The shift leaves a sum of rounding errors where all differences are equal.
    as_far = np.abs(resampled - mean) >= abs(mean) - 1e-12
    return Comparison(
        n=len(differences),
        difference=mean,
        low=float(low),
        high=float(high),
        p_value=float((as_far.sum() + 1) / (RESAMPLES + 1)),
        better=int((differences < 0 if lower_is_better else differences > 0).sum()),
        worse=int((differences > 0 if lower_is_better else differences < 0).sum()),
    )


def _baseline(
    benchmark: Benchmark, task: Task, examples: Sequence[Example]
) -> tuple[str, float] | None:
    """The naive answer of the task, the same to every example, and what it earns."""
    if benchmark.task in ("counting", "ocr"):
        texts = Counter(task.gold(example) for example in examples)
        common = texts.most_common(1)[0][0]
        name, outputs = f"always {common[:40]!r}", [common] * len(examples)
    elif benchmark.task == "grounding":
        whole = [replace(e, answer={"boxes": [[0, 0, *e.images[0].size]]}) for e in examples]
        name, outputs = "the whole image", [task.gold(example) for example in whole]
    else:
        return None
    scores = [task.score(text, e) for text, e in zip(outputs, examples, strict=True)]
    columns, corpus = _metrics(benchmark, task, examples, scores)
    if benchmark.metric in corpus:
        return name, corpus[benchmark.metric] * benchmark.scale
    return name, _mean(columns[benchmark.metric]) * benchmark.scale


def report_lines(report: Report, split: str | None = None) -> Iterator[str]:
    """The report for people.

    Args:
        report: the evaluation.
        split: which split's published numbers to show; None: all.
    """
    benchmark = report.benchmark
    interval = "" if report.interval is None else " [{:.1f}, {:.1f}]".format(*report.interval)
    yield (
        f"{benchmark.title}: {benchmark.metric} {report.value:.1f}{interval} "
        f"(n = {report.n}, {report.answered:.1%} answered)"
    )
    official = benchmark.splits.get(split or "")
    if official is not None and official != report.n:
        yield f"  its {split} has {official} examples; this is a part, or another version, of it"
    if report.baseline is not None:
        yield f"  baseline, {report.baseline[0]}: {report.baseline[1]:.1f}"
    for name, value in report.metrics.items():
        if name != benchmark.metric:
            yield f"  {name:<24} {value:.4f}"
    for name, rows in report.tables.items():
        yield f"by {name}"
        for row in rows[:_GROUPS_SHOWN]:
            mean, low, high = (x * benchmark.scale for x in (row.mean, row.low, row.high))
            yield f"  {row.group:<32} {mean:7.1f} [{low:.1f}, {high:.1f}]  n = {row.n}"
        if len(rows) > _GROUPS_SHOWN:
            yield f"  … and {len(rows) - _GROUPS_SHOWN} more groups"
    shown = [p for p in benchmark.published if split is None or p.split == split]
    if shown:
        yield "published"
    for p in shown:
        checked = "verified" if p.verified else "not verified"
        yield f"  {p.model:<32} {p.value:7.1f}  {p.split}, {checked}: {p.source}"
    if benchmark.note:
        yield f"note: {benchmark.note}"


def comparison_line(comparison: Comparison, scale: float = 100.0) -> str:
    """The comparison for people, on a benchmark's scale."""
    c = comparison
    return (
        f"difference {c.difference * scale:+.1f} [{c.low * scale:+.1f}, {c.high * scale:+.1f}], "
        f"p = {c.p_value:.3g} (paired bootstrap, n = {c.n}; {c.better} better, {c.worse} worse)"
    )
