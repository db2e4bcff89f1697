"""Evaluation on a benchmark by its official metric: tables, baseline, comparison, files."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlm_grpo.benchmarks.definition import Benchmark, load_benchmark
from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import build_scorer, load_split
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError
from vlm_grpo.eval.generate import generate_runs
from vlm_grpo.eval.models import check_weights, load_evaluated_model
from vlm_grpo.eval.outputs import read_outputs
from vlm_grpo.eval.prediction_log import open_log
from vlm_grpo.eval.scored import WITHOUT_TOOLS, Scored, has_answer, summarize
from vlm_grpo.eval.statistics import bootstrap_interval, compare_pairs
from vlm_grpo.eval.tool_gain import compare_tools
from vlm_grpo.serve.chat_client import Endpoint
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import RESIZED, CoordinateFrame
from vlm_grpo.tasks.graders.official_metrics import get_group
from vlm_grpo.tasks.graders.official_parsers import begins_word, describe_reader, unwrap
from vlm_grpo.types import Completion, Example, Score
from vlm_grpo.utils.atomic_io import create_folder, write_atomic

_MAX_GROUPS = 40


@dataclass(frozen=True)
class Report:
    """Results on a benchmark."""

    benchmark: Benchmark
    scored: Scored
    value: float  # the official metric, on the benchmark's scale
    # the official metric of each example, None where it is undefined; None: a corpus metric
    values: Sequence[float | None] | None
    interval: tuple[float, float] | None  # 95 % bootstrap interval; None: a corpus metric
    metrics: Mapping[str, float]  # the benchmark's metrics by name, unscaled
    # of each grouping, rows of group, n, and the unscaled mean with its interval from low to high
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    baseline: tuple[str, float] | None  # name of the naive answer, and its official metric
    # the official metric and the share of outputs with an answer as the reward's parser reads
    # them; None: they are the same, or the benchmark has no parser of its own
    strict: tuple[float, float] | None = None


def build_report(
    benchmark: Benchmark,
    task: Task,
    examples: Sequence[Example],
    outputs: Sequence[Completion],
    scores: Sequence[Score],
    seed: int = 0,
) -> Report:
    """Build the report of scored outputs, without a strict reading.

    A metric that is undefined without an answer (the error of a count) is a mean over the examples
    with an answer. ``examples`` have the resized sizes of their images.
    """
    names = (benchmark.metric, *benchmark.variants)
    for example, score in zip(examples, scores, strict=True):
        if failed := [name for name in names if name in score.failures]:
            reason = score.failures[failed[0]].strip().splitlines()[-1]
            raise UserError(f"{failed[0]} of example {example.id} cannot be computed: {reason}")
    scored = summarize(task, examples, outputs, scores, seed)
    metrics = {name: scored.metrics[name] for name in names if name in scored.metrics}
    baseline = _score_baseline(benchmark, task, examples)
    values, scale = scored.get_column(benchmark.metric), benchmark.scale
    if all(value is None for value in values):
        if np.isnan(scored.value):
            raise UserError(
                f"{benchmark.metric} of {benchmark.title} is undefined here: no output holds an "
                "answer, or the data have no gold objects"
            )
        return Report(benchmark, scored, scored.value * scale, None, None, metrics, {}, baseline)
    groups = {name: [get_group(name, e) for e in examples] for name in benchmark.groups}
    tables = {name: build_group_table(values, groups[name], seed) for name in groups}
    low, high = scored.interval
    value, interval = scored.value * scale, (low * scale, high * scale)
    return Report(benchmark, scored, value, values, interval, metrics, tables, baseline)


def build_group_table(
    values: Sequence[float | None], groups: Sequence[str], seed: int = 0
) -> list[dict[str, Any]]:
    """Return n, mean and interval of every group: numbers by size, then names."""
    parts: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if value is not None:
            parts.setdefault(group, []).append(value)
    rows = []
    for group in sorted(parts, key=lambda g: (0, float(g), "") if g.isdecimal() else (1, 0.0, g)):
        mean = float(np.mean(parts[group]))
        low, high = bootstrap_interval(parts[group], seed=seed)
        rows.append(
            {"group": group, "n": len(parts[group]), "mean": mean, "low": low, "high": high}
        )
    return rows


def _score_baseline(
    benchmark: Benchmark, task: Task, examples: Sequence[Example]
) -> tuple[str, float] | None:
    """Return the name of the answer that is given to every example, and its official metric."""
    if benchmark.task in ("counting", "ocr"):
        common, _ = Counter(map(task.gold, examples)).most_common(1)[0]
        name, texts = f"always {unwrap(common)[:40]!r}", [common] * len(examples)
    elif benchmark.task == "grounding":
        full_images = [replace(e, answer={"boxes": [[0, 0, *e.images[0].size]]}) for e in examples]
        name, texts = "the whole image", [task.gold(example) for example in full_images]
    else:
        return None
    scores = [task.score(text, e) for text, e in zip(texts, examples, strict=True)]
    outputs = [Completion.from_text(text) for text in texts]
    return name, summarize(task, examples, outputs, scores, 0).value * benchmark.scale


def compare(
    benchmark: Benchmark, first: Sequence[float | None], second: Sequence[float | None]
) -> dict[str, Any]:
    """Test the first of two sets of values against the second, on examples that both have.

    Return the comparison as ``results.json`` has it.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        raise UserError("there is nothing to compare: no example has an answer in both outputs")
    test = compare_pairs([b for _, b in pairs], [a for a, _ in pairs])
    better, worse = test.higher, test.lower
    if benchmark.lower_is_better:
        better, worse = worse, better
    low, high = test.interval
    found = {"test": test.test, "n": test.n, "difference": test.b - test.a, "low": low}
    return {**found, "high": high, "p_value": test.p_value, "better": better, "worse": worse}


def format_comparison(benchmark: Benchmark, found: Mapping[str, Any]) -> str:
    difference, low, high = (
        f"{found[name] * benchmark.scale:+.{benchmark.places}f}"
        for name in ("difference", "low", "high")
    )
    return (
        f"difference {difference} [{low}, {high}], p = {found['p_value']:.3g} "
        f"({found['test']}, n = {found['n']}; {found['better']} better, {found['worse']} worse)"
    )


def format_report(report: Report) -> Iterator[str]:
    """Yield the lines of a printed report, with the published results."""
    benchmark, scored = report.benchmark, report.scored
    places, answered = benchmark.places, scored.metrics["answered"]
    interval = ""
    if report.interval is not None:
        interval = " [{:.{p}f}, {:.{p}f}]".format(*report.interval, p=places)
    yield (
        f"{benchmark.title}: {benchmark.metric} {report.value:.{places}f}{interval} "
        f"(n = {scored.n}, {answered:.1%} answered)"
    )
    if benchmark.reader is not None:
        yield f"  read: {describe_reader(benchmark.reader)}"
    if report.strict is not None:
        value, answered = report.strict
        yield f"  as the reward reads answers: {value:.{places}f} ({answered:.1%} answered)"
    if benchmark.reader == "first_letter":
        words = [
            r["output"] for r in scored.rows if has_answer(r["answer"]) and begins_word(r["output"])
        ]
        example = f", such as {' '.join(words[0].split())[:40]!r}" if words else ""
        yield f"  letters read from the start of a word: {len(words) / scored.n:.1%}{example}"
    if (unread := format_unread(scored)) is not None:
        yield f"  {unread}; models were asked for: {benchmark.asked or '?'}"
    if benchmark.differences:
        yield f"  differs from the official script: {benchmark.differences}"
    official = {name: count for name, count in benchmark.splits.items() if count is not None}
    if official and scored.n not in official.values():
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
            mean, low, high = (row[key] * benchmark.scale for key in ("mean", "low", "high"))
            value, interval = f"{mean:7.{places}f}", f"[{low:.{places}f}, {high:.{places}f}]"
            yield f"  {row['group']:<32} {value} {interval}  n = {row['n']}"
        if len(rows) > _MAX_GROUPS:
            yield f"  … and {len(rows) - _MAX_GROUPS} more groups"
    if benchmark.published:
        yield "published"
    for p in benchmark.published:
        checked = "verified" if p.verified else "not verified"
        yield f"  {p.model:<32} {p.value:7.{places}f}  {p.split}, {checked}: {p.source}"
    if benchmark.note:
        yield f"note: {benchmark.note}"


def format_unread(scored: Scored) -> str | None:
    """Format an output without an answer, if fewer than half of the outputs have one."""
    if scored.metrics["answered"] >= 0.5:
        return None
    text = next(row["output"] for row in scored.rows if not has_answer(row["answer"]))
    text = " ".join(text.split())
    return f"most outputs hold no answer that can be read, for example {text[:80]!r}"


def evaluate_benchmark(
    name: str,
    settings: Settings,
    checkpoint: Path | None = None,
    server: Endpoint | str | None = None,
) -> list[Report]:
    """Evaluate a model on a benchmark, and print its report.

    Outputs are written as they are generated, and a stopped evaluation resumes from them. The ranks
    share the examples; rank 0 scores, prints, and writes ``results.json`` to the run's folder, and
    the other ranks return an empty list.

    Args:
        name: name of a benchmark, or a ``.yaml`` file that defines one.
        settings: model, policy, task options, and the rows of the benchmark as ``data.eval``.
        checkpoint: a checkpoint of the model, to compare with it example by example; its report is
            the second of the two.
        server: address of the model; None: its weights are loaded here.
    """
    if settings.evaluation.samples > 1:
        raise UserError(
            "evaluation.samples has no effect on a benchmark, whose official metric is of one "
            "output per example: leave it out, or evaluate a recipe with evaluation.benchmark"
        )
    check_weights(checkpoint, server)
    state = initialize_distributed()
    benchmark = load_benchmark(name)
    examples = _load_examples(settings, benchmark.load_task(**settings.task_options))
    reports: dict[str, Report] = {}
    models = {"model": None} if checkpoint is None else {"model": None, "checkpoint": checkpoint}
    for title, weights in models.items():
        model = load_evaluated_model(settings, weights, server)
        options = {**settings.task_options, "thinking_tags": model.prompts.thinking_tags}
        task = benchmark.load_task(model.prompts.frame, **options)
        folder = settings.run_dir / (weights.name if weights else "model")
        log = open_log(folder, model, weights, task, examples)
        runs = generate_runs(model, task, examples, log)
        if state.is_main_process:
            settings.save(folder / "config.yaml")
            report, *plain = [_score(benchmark, *run, settings) for run in runs]
            scored = compare_tools(report.scored, *(other.scored for other in plain))
            names = (
                n for n in scored.metrics if n.startswith("tools/") or n.endswith(WITHOUT_TOOLS)
            )
            metrics = {**report.metrics, **{name: scored.metrics[name] for name in names}}
            reports[title] = replace(report, scored=scored, metrics=metrics)
            print(f"predictions in {log.path} (boxes in the frame {task.frame.name})")
    if state.is_main_process:
        _finish(settings.run_dir / "results.json", name, reports)
    return [*reports.values()]


def score_benchmark(
    name: str, settings: Settings, path: Path, frame: CoordinateFrame | None = None
) -> Report:
    """Score the outputs of any model as ``evaluate_benchmark``, and print the report.

    ``results-predictions.json`` is written to the run's folder. ``path`` is that of
    ``read_outputs``; ``frame`` is that of the outputs' boxes, by default pixels of the original
    image.
    """
    benchmark = load_benchmark(name)
    task = benchmark.load_task(frame, **settings.task_options)
    examples = _load_examples(settings, task)
    resized, outputs = read_outputs(path, examples, task.frame == RESIZED)
    report = _score(benchmark, task, resized, outputs, settings)
    if len(resized) < len(examples):
        print(f"{len(examples) - len(resized)} more examples have no output in the file")
    results = settings.run_dir / "results-predictions.json"
    _finish(results, name, {"predictions": report})
    return report


def _load_examples(settings: Settings, task: Task) -> Sequence[Example]:
    return load_split(settings, task, "train" if settings.data.eval is None else "eval")


def _score(
    benchmark: Benchmark,
    task: Task,
    examples: Sequence[Example],
    outputs: Sequence[Completion],
    settings: Settings,
) -> Report:
    """Score outputs by the benchmark's reader, and by the reward's parser for comparison."""
    texts, turns = [output.text for output in outputs], [output.turns for output in outputs]
    with build_scorer(settings, rank=0) as scorer:  # only the first rank scores
        scores = scorer(task, texts, examples, turns=turns)
        report = build_report(benchmark, task, examples, outputs, scores, settings.seed)
        if benchmark.reader is None:
            return report
        plain = benchmark.model_copy(update={"reader": None})
        options = {**settings.task_options, "thinking_tags": task.thinking_tags}
        task = plain.load_task(task.frame, **options)
        scores = scorer(task, texts, examples, turns=turns)
        strict = build_report(benchmark, task, examples, outputs, scores, settings.seed)
    pair, own = ((r.value, r.scored.metrics["answered"]) for r in (strict, report))
    return report if pair == own else replace(report, strict=pair)


def _finish(path: Path, name: str, reports: Mapping[str, Report]) -> None:
    """Print the reports and the comparison of the second with the first; write them as JSON."""
    results: dict[str, Any] = {"benchmark": name}
    for title, report in reports.items():
        if len(reports) > 1:
            print(f"\nthe {title}")
        print(*format_report(report), sep="\n")
        names = ("value", "interval", "strict", "baseline", "metrics", "tables")
        found = {name: getattr(report, name) for name in names}
        answered = report.scored.metrics["answered"]
        results[title] = {"n": report.scored.n, "answered": answered, **found}
    values = [report.values for report in reports.values()]
    results["comparison"] = None
    if len(values) > 1 and values[0] is not None and values[1] is not None:
        benchmark = reports["model"].benchmark
        results["comparison"] = compare(benchmark, values[1], values[0])
        print(f"\n{format_comparison(benchmark, results['comparison'])}")
    with create_folder(path.parent):
        write_atomic(path, json.dumps(results, indent=1, ensure_ascii=False).encode())
