"""How good a policy is on held-out examples: one greedy answer each, scored by the task."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.benchmarks import Benchmark, load_benchmark
from vlm_grpo.config import Settings
from vlm_grpo.data import load_examples
from vlm_grpo.engine.sampling import SamplingSettings
from vlm_grpo.errors import UserError
from vlm_grpo.evaluation_report import (
    Report,
    build_report,
    compare,
    comparison_line,
    report_lines,
)
from vlm_grpo.files import write_whole
from vlm_grpo.intervals import bootstrap_interval
from vlm_grpo.judge import Judge
from vlm_grpo.policy import Policy, load_policy
from vlm_grpo.predictions import PredictionLog, read_predictions
from vlm_grpo.registry import load_task
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.types import Example, Score

logger = logging.getLogger(__name__)

CHUNK = 256
"""Examples whose images are in memory at once."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of n examples.

    Attributes:
        headline: name of the task's headline metric.
        n: number of examples.
        metrics: mean of every reward and metric by name, over the examples where it is defined,
            and the task's corpus metrics; ``answered`` is the share with an answer, ``unscorable``
            the number of examples on which a reward that counts has failed.
        interval: 95 % bootstrap interval of the headline metric's mean.
        rows: for each example its id, output, answer, rewards and metrics.
    """

    headline: str
    n: int
    metrics: dict[str, float]
    interval: tuple[float, float]
    rows: tuple[dict, ...]

    @property
    def value(self) -> float:
        return self.metrics[self.headline]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.headline} {self.value:.1%} [{low:.1%}, {high:.1%}] (n = {self.n})"


def evaluate_policy(
    policy: Policy, task: Task, examples: Sequence[Example], settings: Settings, judge: Judge
) -> Evaluation:
    """One completion for each example at ``evaluation.temperature``, scored by the judge.

    What is sampled for an example depends on the seed and its place among the examples alone.
    """
    seen, texts = [], []
    for chunk, outputs in complete(policy, task, examples, settings):
        seen += chunk
        texts += outputs
    return summarise(task, seen, texts, judge(task, texts, seen), settings.seed)


def complete(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    settings: Settings,
    starts: Sequence[int] | None = None,
) -> Iterator[tuple[list[Example], list[str]]]:
    """The policy's outputs, chunk by chunk.

    Args:
        policy: what answers, at ``evaluation.temperature``.
        task: what asks.
        examples: all of them.
        settings: the run's.
        starts: where the chunks that are wanted begin; None: all chunks.

    Yields:
        The chunk's examples, their images' ``seen`` sizes set, and an output for each.
    """
    restriction = replace(policy.restriction, temperature=settings.evaluation.temperature)
    rollout = settings.rollout
    sampling = SamplingSettings(restriction, rollout.max_completion_length, rollout.stop)
    for start in range(0, len(examples), CHUNK) if starts is None else starts:
        chunk = [policy.with_seen_sizes(e) for e in examples[start : start + CHUNK]]
        prompts = [policy.prompt(example, task) for example in chunk]
        seeds = [(settings.seed, "evaluation", start + i) for i in range(len(chunk))]
        tokens = settings.evaluation.max_tokens_per_batch
        drawn = policy.sample(prompts, sampling, 1, seeds, tokens)
        policy.forget_images()
        yield chunk, [members[0].text for members in drawn]


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
    metrics |= _corpus_metrics(task, [score.answer for score in scores], examples)
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
    # No example defines the headline where, say, every reward has failed.
    metrics.setdefault(task.headline, math.nan)
    interval = bootstrap_interval(columns.get(task.headline, []), seed)
    return Evaluation(task.headline, len(scores), metrics, interval, rows)


def _corpus_metrics(
    task: Task, answers: Sequence[Any | None], examples: Sequence[Example]
) -> dict[str, float]:
    try:
        return task.corpus_metrics(answers, examples)
    except FAILURES:  # a user's metric may raise anything; the run must go on
        logger.warning("the corpus metrics failed and are left out", exc_info=True)
        return {}


def evaluate(settings: Settings, checkpoint: Path | None = None) -> Evaluation:
    """Evaluate the recipe's model, or a checkpoint of it, on the recipe's held-out examples.

    Raises:
        UserError: the recipe has no ``data.eval``, or something cannot be loaded.
    """
    if settings.data.eval is None:
        raise UserError("nothing to evaluate on: set data.eval to a dataset")
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(f"checkpoint {checkpoint} is no folder")
    disable_progress_bar()
    task = load_task(settings.task, **settings.task_options)
    examples = load_examples(settings.data.eval, task, settings.data, "eval")
    policy = load_policy(settings, checkpoint, training=False)
    accelerator = Accelerator()
    policy.model.to(accelerator.device)
    task = replace(task, frame=policy.frame)
    with _judge(settings) as judge:
        found = evaluate_policy(policy, task, examples, settings, judge)
    path = settings.run_dir / "evaluation" / f"{checkpoint.name if checkpoint else 'model'}.jsonl"
    write_predictions(path, found)
    accelerator.print(f"{found}\n")
    for name, value in found.metrics.items():
        accelerator.print(f"  {name:<24} {value:.4f}")
    accelerator.print(f"\npredictions in {path}")
    return found


def evaluate_benchmark(
    name: str,
    settings: Settings,
    checkpoint: Path | None = None,
    predictions: Path | None = None,
    split: str | None = None,
) -> list[Report]:
    """Score a model, and a checkpoint of it beside it, by a benchmark's own rule.

    Outputs are written as they come; a stopped evaluation goes on from them.

    Args:
        name: a benchmark, or a ``.yaml`` file that defines one.
        settings: model, policy, and the benchmark's rows as ``data.eval``.
        checkpoint: compare this checkpoint with the model, example by example.
        predictions: score these outputs instead of asking a model.
        split: whose published numbers to print; None: all.

    Raises:
        UserError: something cannot be loaded, or the folder holds another evaluation.
    """
    disable_progress_bar()
    benchmark = load_benchmark(name)
    task = benchmark.load_task()
    source = settings.data.eval or settings.data.train
    loaded = load_examples(source, task, settings.data, "eval")
    examples = [benchmark.ask(example) for example in loaded]
    if predictions is not None:
        seen, texts = read_predictions(predictions, examples)
        return _show([_report(benchmark, task, seen, texts, settings)], split)
    reports = []
    for weights in (None,) if checkpoint is None else (None, checkpoint):
        policy = load_policy(settings, weights, training=False)
        policy.model.to(Accelerator().device)
        if benchmark.frame is None:
            task = replace(task, frame=policy.frame)
        folder = settings.run_dir / (weights.name if weights else "model")
        request = settings.model_dump(mode="json") | {"benchmark": name, "weights": str(weights)}
        log = PredictionLog(folder, request)
        for chunk, texts in complete(
            policy, task, examples, settings, log.missing(examples, CHUNK)
        ):
            log.add(chunk, texts)
        settings.save(folder / "config.yaml")
        seen, texts = read_predictions(log.path, examples)
        reports.append(_report(benchmark, task, seen, texts, settings))
    return _show(reports, split)


def _judge(settings: Settings) -> Judge:
    return Judge(settings.rollout.reward_timeout, settings.rollout.reward_workers)


def _report(
    benchmark: Benchmark,
    task: Task,
    examples: Sequence[Example],
    texts: Sequence[str],
    settings: Settings,
) -> Report:
    with _judge(settings) as judge:
        scores = judge(task, texts, examples)
    return build_report(benchmark, task, examples, scores, settings.seed)


def _show(reports: list[Report], split: str | None) -> list[Report]:
    for index, report in enumerate(reports):
        if len(reports) > 1:
            print("the model" if index == 0 else "\nthe checkpoint")
        print(*report_lines(report, split), sep="\n")
    if len(reports) == 2 and reports[0].values is not None and reports[1].values is not None:
        difference = compare(reports[1].values, reports[0].values)
        print(f"\n{comparison_line(difference, reports[0].benchmark.scale)}")
    return reports


def write_predictions(path: Path, evaluation: Evaluation) -> None:
    """A line for each example with its output, answer, rewards and metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in evaluation.rows)
    write_whole(path, "".join(lines).encode())
