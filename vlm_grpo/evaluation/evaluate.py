"""How good a policy is on held-out examples: one greedy answer each, scored by the task."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.benchmarks import held_out_task, load_benchmark
from vlm_grpo.config.run import Settings
from vlm_grpo.coordinates import RESIZED, CoordinateFrame
from vlm_grpo.data import load_examples
from vlm_grpo.distributed.launch import initialize_distributed
from vlm_grpo.errors import UserError
from vlm_grpo.evaluation.benchmark_report import (
    Comparison,
    Report,
    build_report,
    compare,
    comparison_line,
    report_lines,
)
from vlm_grpo.evaluation.generate import generate_all
from vlm_grpo.evaluation.predictions import PredictionLog, read_predictions
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.rewards.scorer import RewardScorer
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.types import Example, Score
from vlm_grpo.utils.atomic_io import write_atomic
from vlm_grpo.utils.bootstrap import bootstrap_interval

logger = logging.getLogger(__name__)

_DECISIVE = {"model", "model_revision", "seed", "task_options", "policy", "rollout"}
"""Settings that have a say in what is written, besides those of ``evaluation`` but when it is."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of n examples.

    Attributes:
        primary metric: name of the task's primary metric metric.
        n: number of examples.
        metrics: mean of every reward and metric by name, over the examples where it is defined,
            and the task's corpus metrics; ``answered`` is the share with an answer, ``unscorable``
            the number of examples on which a reward that counts has failed.
        interval: 95 % bootstrap interval of the primary metric metric's mean; NaN for a metric of
        the
            whole set.
        rows: for each example its id, output, answer, rewards and metrics.
        lower_is_better: the primary metric is an error.
        path: the file of the predictions; None where they are in none.
    """

    primary_metric: str
    n: int
    metrics: dict[str, float]
    interval: tuple[float, float]
    rows: tuple[dict, ...]
    lower_is_better: bool = False
    path: Path | None = None

    @property
    def value(self) -> float:
        return self.metrics[self.primary_metric]

    def better_than(self, other: float | None) -> bool:
        """Whether the primary metric beats another value of it; None is beaten by every number."""
        if math.isnan(self.value):
            return False
        if other is None:
            return True
        return self.value < other if self.lower_is_better else self.value > other

    def __str__(self) -> str:
        value, low, high = (shown(v, self.lower_is_better) for v in (self.value, *self.interval))
        interval = "" if math.isnan(self.interval[0]) else f" [{low}, {high}]"
        return f"{self.primary_metric} {value}{interval} (n = {self.n})"


def shown(value: float, lower_is_better: bool) -> str:
    """A primary metric's value for people: a share in percent, an error as it is."""
    return f"{value:.3f}" if lower_is_better else f"{value:.1%}"


def evaluate_policy(
    policy: Policy, task: Task, examples: Sequence[Example], settings: Settings, judge: RewardScorer
) -> Evaluation:
    """One completion for each example at ``evaluation.temperature``, scored by the judge; each
    rank asks its share and returns the whole.

    What is sampled for an example depends on the seed and its place among the examples alone.
    """
    seen, texts = generate_all(policy, task, examples, settings)
    return summarise(task, seen, texts, judge(task, texts, seen), settings.seed)


def summarise(
    task: Task,
    examples: Sequence[Example],
    texts: Sequence[str],
    scores: Sequence[Score],
    seed: int,
) -> Evaluation:
    """Means and interval of scores; ``seed`` is the bootstrap's."""
    columns: dict[str, list[float]] = {}
    for score in scores:
        for name, value in (*score.rewards.items(), *score.metrics.items()):
            columns.setdefault(name, [])
            if value is not None:
                columns[name].append(value)
    metrics = {name: float(np.mean(values)) for name, values in columns.items() if values}
    metrics["answered"] = float(np.mean([score.answer is not None for score in scores]))
    metrics["unscorable"] = sum(score.total is None for score in scores)
    whole = _corpus_metrics(task, [score.answer for score in scores], examples)
    metrics |= whole
    rows = tuple(
        {
            "id": example.id,
            "output": text,
            "answer": score.answer,
            "rewards": dict(score.rewards),
            "metrics": dict(score.metrics),
        }
        for example, text, score in zip(examples, texts, scores, strict=True)
    )
    # No example defines the primary metric where, say, every reward has failed.
    metrics.setdefault(task.primary_metric, math.nan)
    # A mean over groups is of the whole too: the examples' values have another mean.
    values = [] if task.primary_metric in whole else columns.get(task.primary_metric, [])
    interval = bootstrap_interval(values, seed)
    return Evaluation(
        task.primary_metric, len(scores), metrics, interval, rows, task.lower_is_better
    )


def _corpus_metrics(
    task: Task, answers: Sequence[Any | None], examples: Sequence[Example]
) -> dict[str, float]:
    try:
        return task.corpus_metrics(answers, examples)
    except FAILURES:  # a user's metric may raise anything; the run must go on
        logger.warning("the corpus metrics failed and are left out", exc_info=True)
        return {}


def evaluate(settings: Settings, checkpoint: str | Path | None = None) -> Evaluation:
    """Evaluate the recipe's model, or a checkpoint of it, on the recipe's held-out examples.

    The predictions are written into the run's folder, under ``evaluation``.

    Raises:
        UserError: the recipe has no ``data.eval``, or something cannot be loaded.
    """
    if settings.data.eval is None:
        raise UserError("nothing to evaluate on: set data.eval to a dataset")
    checkpoint = None if checkpoint is None else Path(checkpoint)
    _refuse_no_folder(checkpoint)
    disable_progress_bar()
    own = load_task(settings.task, **settings.task_options)
    task = held_out_task(settings, own)
    examples = load_examples(settings.data.eval, task, settings.data, "eval")
    policy = load_policy(settings, checkpoint, training=False)
    state = initialize_distributed()
    policy.model.to(state.device)
    task = held_out_task(settings, replace(own, frame=policy.frame))
    with _judge(settings) as judge:
        found = evaluate_policy(policy, task, examples, settings, judge)
    path = settings.run_dir / "evaluation" / f"{checkpoint.name if checkpoint else 'model'}.jsonl"
    if state.is_main_process:
        write_predictions(path, found)
    return replace(found, path=path)


def _refuse_no_folder(checkpoint: Path | None) -> None:
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(f"checkpoint {checkpoint} is not a folder")


def evaluate_benchmark(
    name: str,
    settings: Settings,
    checkpoint: Path | None = None,
    split: str | None = None,
) -> list[Report]:
    """Score a model, and a checkpoint of it beside it, by a benchmark's own rule.

    Outputs are written as they come; a stopped evaluation goes on from them. Each rank asks its
    share; the first one scores and prints, and writes ``results.json`` into the run's folder.

    Args:
        name: a benchmark, or a ``.yaml`` file that defines one.
        settings: model, policy, task options, and the benchmark's rows as ``data.eval``.
        checkpoint: compare this checkpoint with the model, example by example.
        split: whose published numbers to print; None: all.

    Returns:
        The model's report and the checkpoint's; none on other ranks than the first.

    Raises:
        UserError: something cannot be loaded, or the folder holds another evaluation.
    """
    disable_progress_bar()
    _refuse_no_folder(checkpoint)
    state = initialize_distributed()
    benchmark = load_benchmark(name)
    reports: dict[str, Report] = {}
    for title, weights in {"the model": None, "the checkpoint": checkpoint}.items():
        if title == "the checkpoint" and weights is None:
            continue
        task = benchmark.load_task(**settings.task_options)
        examples = _benchmark_examples(settings, task)
        policy = load_policy(settings, weights, training=False)
        policy.model.to(state.device)
        task = benchmark.load_task(policy.frame, **settings.task_options)
        folder = settings.run_dir / (weights.name if weights else "model")
        request = _request(settings, weights, task, examples)
        with state.main_process_first():
            log = PredictionLog(folder, request, state.process_index)
        seen, texts = generate_all(policy, task, examples, settings, log)
        if state.is_main_process:
            settings.save(folder / "config.yaml")
            with _judge(settings) as judge:
                scores = judge(task, texts, seen)
            reports[title] = build_report(benchmark, task, seen, scores, settings.seed)
            print(f"predictions in {log.path} (boxes in the {task.frame.name} frame)")
    if not state.is_main_process:
        return []
    comparison = _compare(list(reports.values()))
    _show(reports, comparison, split)
    _write_results(settings.run_dir / "results.json", name, reports, comparison)
    return list(reports.values())


def _judge(settings: Settings) -> RewardScorer:
    return RewardScorer(settings.rollout.reward_timeout, settings.rollout.reward_workers)


def score_benchmark(
    name: str,
    settings: Settings,
    predictions: Path,
    frame: CoordinateFrame | None = None,
    split: str | None = None,
) -> Report:
    """Score outputs that any model wrote, by a benchmark's own rule.

    Args:
        name: as for ``evaluate_benchmark``.
        settings: the benchmark's rows as ``data.eval``, task options, seed.
        predictions: as for ``read_predictions``.
        frame: in which the outputs' boxes are written; None: pixels of the original image.
        split: whose published numbers to print; None: all.

    Raises:
        UserError: something cannot be loaded, or predictions and rows do not match.
    """
    benchmark = load_benchmark(name)
    task = benchmark.load_task(frame, **settings.task_options)
    examples = _benchmark_examples(settings, task)
    seen, texts = read_predictions(predictions, examples, needs_resized_size=task.frame == RESIZED)
    with _judge(settings) as judge:
        scores = judge(task, texts, seen)
    report = build_report(benchmark, task, seen, scores, settings.seed)
    _show({"the predictions": report}, None, split)
    return report


def _benchmark_examples(settings: Settings, task: Task) -> list[Example]:
    return load_examples(settings.data.eval or settings.data.train, task, settings.data, "eval")


def _request(
    settings: Settings, weights: Path | None, task: Task, examples: Sequence[Example]
) -> dict[str, Any]:
    """What decides the outputs: settings, weights and questions."""
    chosen = settings.model_dump(mode="json", include=_DECISIVE)
    chosen["evaluation"] = settings.evaluation.model_dump(mode="json", exclude={"every"})
    chosen["data"] = settings.data.model_dump(mode="json", include={"eval", "eval_limit"})
    asked = hashlib.sha256()
    for example in examples:
        sizes = [image.size for image in example.images]
        asked.update(repr((example.id, task.prompt(example), sizes)).encode())
    files = sorted(weights.iterdir()) if weights else []
    states = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return {
        **chosen,
        "weights": str(weights),
        "files": hashlib.sha256(repr(states).encode()).hexdigest(),
        "questions": asked.hexdigest(),
    }


def _compare(reports: Sequence[Report]) -> Comparison | None:
    """The last of two reports against the first, where both have values of examples."""
    if len(reports) < 2 or reports[0].values is None or reports[1].values is None:
        return None
    lower = reports[0].benchmark.lower_is_better
    return compare(reports[1].values, reports[0].values, lower_is_better=lower)


def _show(reports: Mapping[str, Report], comparison: Comparison | None, split: str | None) -> None:
    for title, report in reports.items():
        if len(reports) > 1:
            print(f"\n{title}")
        print(*report_lines(report, split), sep="\n")
    if comparison is not None:
        (report, *_) = reports.values()
        print(f"\n{comparison_line(comparison, report.benchmark.scale)}")


def _write_results(
    path: Path, name: str, reports: Mapping[str, Report], comparison: Comparison | None
) -> None:
    """What was printed, for programs."""
    record: dict[str, Any] = {"benchmark": name}
    for title, report in reports.items():
        values = asdict(report)
        record[title.removeprefix("the ")] = {
            key: values[key]
            for key in ("n", "value", "interval", "answered", "baseline", "metrics", "tables")
        }
    record["comparison"] = None if comparison is None else asdict(comparison)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")


def write_predictions(path: Path, evaluation: Evaluation) -> None:
    """A line for each example with its output, answer, rewards and metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in evaluation.rows)
    write_atomic(path, "".join(lines).encode())


def write_summary(path: Path, evaluation: Evaluation) -> None:
    """Its primary metric and every finite metric, those of the whole set too, which no line has."""
    summary = {
        "headline": evaluation.primary_metric,
        "lower_is_better": evaluation.lower_is_better,
        "n": evaluation.n,
        "metrics": {k: v for k, v in evaluation.metrics.items() if math.isfinite(v)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(summary, indent=1).encode())
