"""Evaluate a policy on held-out examples: one or several answers to each, scored by the task."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from vlm_grpo.benchmarks.definition import Benchmark, load_benchmark
from vlm_grpo.benchmarks.script_outputs import name_files, write_files
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.data import load_run_task, load_split
from vlm_grpo.data.objects import NO_OBJECTS, Objects
from vlm_grpo.data.run_data import build_scorer, get_held_out_task, load_data
from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError
from vlm_grpo.eval.benchmark_report import (
    Comparison,
    Report,
    add_strict_reading,
    build_report,
    compare,
    find_unread,
    format_comparison,
    format_report,
)
from vlm_grpo.eval.foreign import PREDICTIONS, read_outputs
from vlm_grpo.eval.generate import EvaluatedModel, LocalModel, generate_all
from vlm_grpo.eval.predictions import PredictionLog, build_request
from vlm_grpo.eval.scored import Scored, summarize
from vlm_grpo.eval.served import load_evaluated_model
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve.chat import Endpoint
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import RESIZED, CoordinateFrame
from vlm_grpo.task.scorer import FailureGuard, RewardScorer
from vlm_grpo.types import Example, Score
from vlm_grpo.utils.atomic_io import create_folder, write_atomic

logger = logging.getLogger(__name__)

_RESULTS = ("n", "value", "interval", "answered", "strict", "baseline", "metrics", "tables")
"""Fields of a report in ``results.json``."""


def evaluate_policy(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    settings: Settings,
    scorer: RewardScorer,
) -> Scored:
    """Generate and score ``evaluation.samples`` completions of each example.

    The ranks share the examples; each returns the evaluation of all. The completions of an example
    depend only on the seed and on the example's index.

    Raises:
        UserError: on all ranks, if an example cannot be read, or a reward fails on all.
    """
    return _evaluate(LocalModel(policy, settings), task, examples, scorer)


def _evaluate(
    model: EvaluatedModel,
    task: Task,
    examples: Sequence[Example],
    scorer: RewardScorer,
    log: PredictionLog | None = None,
) -> Scored:
    resized, texts = generate_all(model, task, examples, log)
    scores = score_all(task, resized, texts, scorer)
    return summarize(task, resized, texts, scores, model.settings.seed)


def score_all(
    task: Task, examples: Sequence[Example], texts: Sequence[str], scorer: RewardScorer
) -> list[Score]:
    """Score the outputs of ``generate_all``, shared among the ranks, and return all on every rank.

    Raises:
        UserError: on all ranks, if a reward fails on all outputs.
    """
    state = initialize_distributed()
    rank, ranks, count = state.process_index, state.num_processes, len(texts) // len(examples)
    items = [example for example in examples for _ in range(count)]
    own = [index for index in range(len(texts)) if index // count % ranks == rank]
    found: list[Score] = []
    with fail_together(state):  # each completion is scored once: a judge costs time and money
        groups = [index // count for index in own]
        found = scorer(task, [texts[i] for i in own], [items[i] for i in own], groups=groups)
    by_index = dict(gather_object(list(zip(own, found, strict=True))))
    scores = [by_index[index] for index in range(len(texts))]
    FailureGuard().check(task, scores, items)
    return scores


def evaluate(
    settings: Settings,
    checkpoint: str | Path | None = None,
    server: Endpoint | str | None = None,
    objects: Objects = NO_OBJECTS,
) -> Scored:
    """Evaluate the recipe's model, a checkpoint or a server on the recipe's held-out examples.

    The predictions are written to the folder ``evaluation`` of the run. Outputs of a server are
    written as they come, and a stopped evaluation of it resumes from them.

    Raises:
        UserError: the recipe has no ``data.eval``, the model or the data cannot be loaded, or the
            server cannot be used or gave no output for some examples.
    """
    settings = objects.name_in(check_settings(settings))
    if not settings.data.has_held_out:
        raise UserError("nothing to evaluate on: set data.eval to a dataset")
    checkpoint = None if checkpoint is None else Path(checkpoint)
    check_weights(checkpoint, server)
    disable_progress_bar()
    run_task = load_run_task(settings, objects)
    task = get_held_out_task(settings, run_task)
    if settings.data.eval is None:
        _, examples = load_data(settings, run_task, objects)
    else:
        examples = load_split(settings, task, "eval", objects)
    model = load_evaluated_model(settings, checkpoint, server)
    state = initialize_distributed()
    task = get_held_out_task(settings, model.prompts.adapt(run_task))
    name, log = checkpoint.name if checkpoint else "model", None
    if server is not None:
        name = name_served(model)
        request = build_request(settings, checkpoint, task, examples) | model.identity
        log = PredictionLog(settings.run_dir / "evaluation" / name, request)
    with build_scorer(settings, state.process_index) as scorer:
        evaluation = _evaluate(model, task, examples, scorer, log)
    path = settings.run_dir / "evaluation" / f"{name}.jsonl"
    if state.is_main_process:
        evaluation.write(path)
    return replace(evaluation, path=path)


def name_served(model: EvaluatedModel) -> str:
    """Return the name of the folder of a server's outputs."""
    return "served-" + re.sub(r"[^\w.-]", "-", model.identity["served_model"])


def check_weights(checkpoint: Path | None, server: Endpoint | str | None) -> None:
    """Raise ``UserError`` if there are two models, or the checkpoint is not a folder."""
    if checkpoint is not None and server is not None:
        raise UserError(
            "a server has its own weights: leave out the checkpoint, or the server; the settings "
            "of a run are those of its config.yaml, given as the recipe"
        )
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(f"checkpoint {checkpoint} is not a folder")


def evaluate_benchmark(
    name: str,
    settings: Settings,
    checkpoint: Path | None = None,
    split: str | None = None,
    server: Endpoint | str | None = None,
) -> list[Report]:
    """Evaluate a model on a benchmark, and print its report.

    Outputs are written as they are generated, and a stopped evaluation resumes from them. The ranks
    share the examples; rank 0 scores, prints, and writes ``results.json`` and what the benchmark's
    official script reads to the run's folder.

    Args:
        name: name of a benchmark, or a ``.yaml`` file that defines one.
        settings: model, policy, task options, and the rows of the benchmark as ``data.eval``.
        checkpoint: a checkpoint of the model, to compare with it example by example.
        split: split whose published results to print; None: all.
        server: address of the model; None: its weights are loaded here.

    Returns:
        The reports of the model and of the checkpoint; on ranks other than 0 an empty list.

    Raises:
        UserError: the model or the data cannot be loaded, the folder has another evaluation, or the
            server cannot be used or gave no output for some examples.
    """
    if settings.evaluation.samples > 1:
        raise UserError(
            "evaluation.samples has no effect on a benchmark, whose official metric is of one "
            "output per example: leave it out, or evaluate a recipe with evaluation.benchmark"
        )
    disable_progress_bar()
    check_weights(checkpoint, server)
    state = initialize_distributed()
    benchmark = load_benchmark(name)
    benchmark.check_split(split)
    reports: dict[str, Report] = {}
    for title, weights in {"the model": None, "the checkpoint": checkpoint}.items():
        if title == "the checkpoint" and weights is None:
            continue
        task = benchmark.load_task(**settings.task_options)
        examples = _load_benchmark_examples(benchmark, settings, task)
        model = load_evaluated_model(settings, weights, server)
        options = {**settings.task_options, "thinking_tags": model.prompts.thinking_tags}
        task = benchmark.load_task(model.prompts.frame, **options)
        folder = settings.run_dir / (weights.name if weights else "model")
        request = build_request(settings, weights, task, examples) | model.identity
        with state.main_process_first():
            log = PredictionLog(folder, request, state.process_index)
        resized, texts = generate_all(model, task, examples, log)
        if state.is_main_process:
            settings.save(folder / "config.yaml")
            reports[title] = _build_report(benchmark, task, resized, texts, settings)
            print(f"predictions in {log.path} (boxes in the frame {task.frame.name})")
            _write_script_outputs(benchmark, task, resized, texts, folder)
    if not state.is_main_process:
        return []
    comparison = _compare(list(reports.values()))
    _print_reports(reports, comparison, split)
    _write_results(settings.run_dir / "results.json", name, reports, comparison)
    return list(reports.values())


def _build_report(
    benchmark: Benchmark,
    task: Task,
    examples: Sequence[Example],
    texts: Sequence[str],
    settings: Settings,
) -> Report:
    """Score outputs by the benchmark's reader, and by the reward's parser for comparison."""
    with build_scorer(settings, rank=0) as scorer:  # only the first rank scores
        scores = scorer(task, texts, examples)
        report = build_report(benchmark, task, examples, scores, settings.seed)
        report = replace(report, unread=find_unread(texts, scores))
        if benchmark.reader is None:
            return report
        plain = benchmark.model_copy(update={"reader": None})
        options = {**settings.task_options, "thinking_tags": task.thinking_tags}
        strict = plain.load_task(task.frame, **options)
        return add_strict_reading(report, strict, examples, scorer(strict, texts, examples))


def score_benchmark(
    name: str,
    settings: Settings,
    predictions: Path | tuple[str, Path],
    frame: CoordinateFrame | None = None,
    split: str | None = None,
) -> Report:
    """Score the outputs of any model on a benchmark, and print the report.

    ``results-predictions.json`` and what the benchmark's official script reads are written to the
    run's folder.

    Args:
        name: as for ``evaluate_benchmark``.
        settings: the rows of the benchmark as ``data.eval``, task options, seed.
        predictions: as for ``read_predictions``; or a key of ``foreign.LAYOUTS`` and the file.
        frame: coordinate frame of the outputs' boxes; None: pixels of the original image.
        split: split whose published results to print; None: all.

    Raises:
        UserError: the data cannot be loaded, or predictions and rows do not match.
    """
    benchmark = load_benchmark(name)
    benchmark.check_split(split)
    task = benchmark.load_task(frame, **settings.task_options)
    examples = _load_benchmark_examples(benchmark, settings, task)
    layout, path = predictions if isinstance(predictions, tuple) else (PREDICTIONS, predictions)
    resized, texts = read_outputs(layout, path, examples, task.frame == RESIZED)
    report = _build_report(benchmark, task, resized, texts, settings)
    _write_script_outputs(benchmark, task, resized, texts, settings.run_dir / "predictions")
    if len(resized) < len(examples):
        print(f"{len(examples) - len(resized)} more examples have no output in the file")
    reports = {"the predictions": report}
    _print_reports(reports, None, split)
    _write_results(settings.run_dir / "results-predictions.json", name, reports, None)
    return report


def _load_benchmark_examples(
    benchmark: Benchmark, settings: Settings, task: Task
) -> Sequence[Example]:
    examples = load_split(settings, task, "train" if settings.data.eval is None else "eval")
    if benchmark.script_outputs is not None:
        name_files(benchmark.script_outputs, examples)  # refuse bad names before hours of work
    return examples


def _write_script_outputs(
    benchmark: Benchmark, task: Task, examples: Sequence[Example], texts: Sequence[str], name: Path
) -> None:
    """Write the answers in ``texts`` for the official script, if the benchmark has a form for it.

    The script names its results after the folder, so the folder's name has the run's in it.
    """
    form = benchmark.script_outputs
    if form is not None:
        folder = name.parent / f"{name.parent.name}-{name.name}-{form}"
        answers = [task.read(text, e) or "" for text, e in zip(texts, examples, strict=True)]
        write_files(form, folder, examples, answers)
        print(f"outputs for the official script in {folder}")


def _compare(reports: Sequence[Report]) -> Comparison | None:
    """Compare the second report with the first, if both have values of examples."""
    if len(reports) < 2 or reports[0].values is None or reports[1].values is None:
        return None
    lower = reports[0].benchmark.lower_is_better
    return compare(reports[1].values, reports[0].values, lower_is_better=lower)


def _print_reports(
    reports: Mapping[str, Report], comparison: Comparison | None, split: str | None
) -> None:
    for title, report in reports.items():
        if len(reports) > 1:
            print(f"\n{title}")
        print(*format_report(report, split), sep="\n")
    if comparison is not None:
        (report, *_) = reports.values()
        print(f"\n{format_comparison(comparison, report.benchmark)}")


def _write_results(
    path: Path, name: str, reports: Mapping[str, Report], comparison: Comparison | None
) -> None:
    """Write the reports as JSON."""
    results: dict[str, Any] = {"benchmark": name}
    for title, report in reports.items():
        values = asdict(report)
        results[title.removeprefix("the ")] = {key: values[key] for key in _RESULTS}
    results["comparison"] = None if comparison is None else asdict(comparison)
    with create_folder(path.parent):
        write_atomic(path, json.dumps(results, indent=1, ensure_ascii=False).encode())
