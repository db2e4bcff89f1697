"""Reports of benchmarks: official metric, interval, tables by group, baseline, comparison.

Pure functions of examples and scores, for the outputs of any model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlm_grpo.benchmarks.definition import Benchmark
from vlm_grpo.benchmarks.official import READERS, unwrap
from vlm_grpo.benchmarks.rules import get_group
from vlm_grpo.errors import UserError
from vlm_grpo.eval.statistics import bootstrap_interval, compare_pairs
from vlm_grpo.task import Task
from vlm_grpo.types import Example, Score

_MAX_GROUPS = 40


@dataclass(frozen=True)
class GroupRow:
    """One row of a table: a group's number of examples, mean and 95 % interval."""

    group: str
    n: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Difference of two sets of outputs for the same examples, first minus second.

    Attributes:
        test: name of the test; see ``compare_pairs``.
        n: number of examples for which both have a value.
        difference: mean of the differences, in the unit of the metric.
        low, high: 95 % bootstrap interval of the difference.
        p_value: probability of a difference at least this large under the null hypothesis.
        better, worse: number of examples on which the first is better, and worse.
    """

    test: str
    n: int
    difference: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int


@dataclass(frozen=True)
class Report:
    """Results of an evaluation on a benchmark.

    Attributes:
        benchmark: the benchmark.
        n: number of examples.
        value: the official metric, on the benchmark's scale.
        interval: its 95 % bootstrap interval; None for a corpus metric.
        metrics: every metric by name, unscaled.
        values: the official metric of each example, None where it is undefined without an
            answer; None for a corpus metric.
        tables: rows of each grouping of the benchmark.
        baseline: name of the naive answer, and its official metric.
        answered: share of outputs with an answer.
        strict: the official metric and ``answered`` with the answers that the reward's parser
            reads; None if both are the same, or the benchmark has no parser of its own.
        unread: an output without an answer; None: most outputs have one.
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
    strict: tuple[float, float] | None = None
    unread: str | None = None


def build_report(
    benchmark: Benchmark,
    task: Task,
    examples: Sequence[Example],
    scores: Sequence[Score],
    seed: int = 0,
) -> Report:
    """Compute the report of scored outputs.

    Args:
        benchmark: the benchmark.
        task: the task that scored the outputs, with their coordinate frame.
        examples: the examples, with the resized sizes of their images.
        scores: result of ``task.score`` for each output.
        seed: seed of the bootstrap.
    """
    columns, corpus = _collect_metrics(benchmark, task, examples, scores)
    values = columns.get(benchmark.metric)
    interval = None
    tables = {}
    if values is None:
        value = corpus[benchmark.metric]
    else:
        value = _mean(values) if benchmark.average == "examples" else corpus[benchmark.metric]
        strata = [*_split(values, _get_strata(benchmark, examples)).values()]
        low, high = bootstrap_interval(*strata, seed=seed)
        interval = (low * benchmark.scale, high * benchmark.scale)
        for name in benchmark.groups:
            groups = [get_group(name, example) for example in examples]
            tables[name] = build_group_table(values, groups, seed)
    return Report(
        benchmark=benchmark,
        n=len(examples),
        value=value * benchmark.scale,
        interval=interval,
        metrics={name: _mean(column) for name, column in columns.items()} | corpus,
        values=None if values is None else tuple(values),
        tables=tables,
        baseline=_score_baseline(benchmark, task, examples),
        answered=get_answered(scores),
    )


def get_answered(scores: Sequence[Score]) -> float:
    """Return the share of outputs with an answer."""
    return float(np.mean([not _is_empty(score.answer) for score in scores]))


def find_unread(texts: Sequence[str], scores: Sequence[Score]) -> str | None:
    """Return the first output without an answer if fewer than half of the outputs have one."""
    if get_answered(scores) >= 0.5:
        return None
    return next(t for t, score in zip(texts, scores, strict=True) if _is_empty(score.answer))


def _is_empty(answer: object) -> bool:
    return answer is None or (isinstance(answer, str) and not answer)


def add_strict_reading(
    report: Report, task: Task, examples: Sequence[Example], scores: Sequence[Score]
) -> Report:
    """Add the official metric of the answers that the reward's parser reads, if it differs.

    Args:
        report: the report of the same outputs.
        task: the task without the benchmark's reader.
        examples: the examples, with the resized sizes of their images.
        scores: result of ``task.score`` for each output.
    """
    strict = build_report(report.benchmark, task, examples, scores)
    pair = (strict.value, strict.answered)
    return report if pair == (report.value, report.answered) else replace(report, strict=pair)


def _collect_metrics(
    benchmark: Benchmark, task: Task, examples: Sequence[Example], scores: Sequence[Score]
) -> tuple[dict[str, list[float | None]], dict[str, float]]:
    """Return the benchmark's metrics: values of the examples, and corpus metrics.

    A metric that is undefined without an answer (the error of a count) is None there, so the mean
    is over the examples with an answer.

    Raises:
        UserError: a metric failed, or the official one is undefined on all examples.
    """
    all_corpus = task.corpus_metrics([score.answer for score in scores], examples)
    columns: dict[str, list[float | None]] = {}
    corpus: dict[str, float] = {}
    for name in (benchmark.metric, *benchmark.variants):
        for example, score in zip(examples, scores, strict=True):
            if name in score.failures:
                reason = score.failures[name].strip().splitlines()[-1]
                raise UserError(f"{name} of example {example.id} cannot be computed: {reason}")
        if name in all_corpus:
            corpus[name] = all_corpus[name]
        values = [{**score.rewards, **score.metrics}.get(name) for score in scores]
        if any(value is not None for value in values):
            columns[name] = values
    if benchmark.metric not in columns and benchmark.metric not in corpus:
        raise UserError(
            f"{benchmark.metric} of {benchmark.title} is undefined here: no output holds an "
            "answer, or the data have no gold objects"
        )
    return columns, corpus


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are not None; there must be one."""
    return float(np.mean([value for value in values if value is not None]))


def _get_strata(benchmark: Benchmark, examples: Sequence[Example]) -> list[str]:
    if benchmark.average == "groups":
        return [get_group(benchmark.groups[0], example) for example in examples]
    return [""] * len(examples)


def _split(values: Sequence[float | None], groups: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the values that are not None of each group."""
    split: dict[str, list[float]] = defaultdict(list)
    for value, group in zip(values, groups, strict=True):
        if value is not None:
            split[group].append(value)
    return {group: np.asarray(part, float) for group, part in split.items()}


def build_group_table(
    values: Sequence[float | None], groups: Sequence[str], seed: int = 0
) -> tuple[GroupRow, ...]:
    """Return n, mean and interval of every group, in natural order (numbers by size)."""
    parts = sorted(_split(values, groups).items(), key=lambda item: _natural_key(item[0]))
    rows = []
    for group, part in parts:
        interval = bootstrap_interval(part, seed=seed)
        rows.append(GroupRow(group, len(part), float(part.mean()), *interval))
    return tuple(rows)


def _natural_key(group: str) -> tuple[int, float, str]:
    return (0, float(group), "") if group.isdecimal() else (1, 0.0, group)


def compare(
    first: Sequence[float | None], second: Sequence[float | None], lower_is_better: bool = False
) -> Comparison:
    """Test the differences of two sets of outputs for the same examples, as ``compare_pairs`` does.

    Args:
        first, second: metric of each example, in the same order; examples where either is None are
            ignored.
        lower_is_better: the metric is an error.

    Raises:
        UserError: no example has both values.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        raise UserError("there is nothing to compare: no example has an answer in both outputs")
    test = compare_pairs([b for _, b in pairs], [a for a, _ in pairs])
    counts = (test.lower, test.higher) if lower_is_better else (test.higher, test.lower)
    return Comparison(test.test, test.n, test.b - test.a, *test.interval, test.p_value, *counts)


def _score_baseline(
    benchmark: Benchmark, task: Task, examples: Sequence[Example]
) -> tuple[str, float] | None:
    """Return the name of the naive answer, equal for every example, and its official metric."""
    if benchmark.task in ("counting", "ocr"):
        common, _ = Counter(map(task.gold, examples)).most_common(1)[0]
        name, outputs = f"always {unwrap(common)[:40]!r}", [common] * len(examples)
    elif benchmark.task == "grounding":
        full_images = [replace(e, answer={"boxes": [[0, 0, *e.images[0].size]]}) for e in examples]
        name, outputs = "the whole image", [task.gold(example) for example in full_images]
    else:
        return None
    scores = [task.score(text, e) for text, e in zip(outputs, examples, strict=True)]
    columns, corpus = _collect_metrics(benchmark, task, examples, scores)
    if benchmark.metric in corpus:
        return name, corpus[benchmark.metric] * benchmark.scale
    return name, _mean(columns[benchmark.metric]) * benchmark.scale


def format_report(report: Report, split: str | None = None) -> Iterator[str]:
    """Yield the lines of a printed report.

    Args:
        report: the report.
        split: split whose published results to show; None: all.
    """
    benchmark = report.benchmark
    places = benchmark.places
    interval = ""
    if report.interval is not None:
        interval = " [{:.{p}f}, {:.{p}f}]".format(*report.interval, p=places)
    yield (
        f"{benchmark.title}: {benchmark.metric} {report.value:.{places}f}{interval} "
        f"(n = {report.n}, {report.answered:.1%} answered)"
    )
    if benchmark.reader is not None:
        yield f"  read: {READERS[benchmark.reader].description}"
    if report.strict is not None:
        value, answered = report.strict
        yield f"  as the reward reads answers: {value:.{places}f} ({answered:.1%} answered)"
    if report.unread is not None:
        yield f"  {format_unread(report.unread)}; models were asked for: {benchmark.asked or '?'}"
    if benchmark.differences:
        yield f"  differs from the official script: {benchmark.differences}"
    official = {
        name: count
        for name, count in benchmark.splits.items()
        if count is not None and split in (None, name)
    }
    if official and report.n not in official.values():
        counts = ", ".join(f"{name} has {count}" for name, count in official.items())
        yield f"  its {counts} examples; this is a part or another version of it"
    if report.baseline is not None:
        yield f"  baseline, {report.baseline[0]}: {report.baseline[1]:.{places}f}"
    for name, value in report.metrics.items():
        if name != benchmark.metric:
            yield f"  {name:<24} {value:.4f}"
    for name, rows in report.tables.items():
        yield f"by {name}"
        for row in rows[:_MAX_GROUPS]:
            mean, low, high = (x * benchmark.scale for x in (row.mean, row.low, row.high))
            value, interval = f"{mean:7.{places}f}", f"[{low:.{places}f}, {high:.{places}f}]"
            yield f"  {row.group:<32} {value} {interval}  n = {row.n}"
        if len(rows) > _MAX_GROUPS:
            yield f"  … and {len(rows) - _MAX_GROUPS} more groups"
    published = [p for p in benchmark.published if split is None or p.split == split]
    if published:
        yield "published"
    for p in published:
        checked = "verified" if p.verified else "not verified"
        yield f"  {p.model:<32} {p.value:7.{places}f}  {p.split}, {checked}: {p.source}"
    if benchmark.note:
        yield f"note: {benchmark.note}"


def format_unread(text: str) -> str:
    """Format an example of the outputs without an answer."""
    text = " ".join(text.split())
    return f"most outputs hold no answer that can be read, for example {text[:80]!r}"


def format_comparison(comparison: Comparison, benchmark: Benchmark) -> str:
    """Format a comparison as one line, in the unit of a benchmark."""
    c = comparison
    difference, low, high = (
        f"{value * benchmark.scale:+.{benchmark.places}f}"
        for value in (c.difference, c.low, c.high)
    )
    return (
        f"difference {difference} [{low}, {high}], p = {c.p_value:.3g} "
        f"({c.test}, n = {c.n}; {c.better} better, {c.worse} worse)"
    )
