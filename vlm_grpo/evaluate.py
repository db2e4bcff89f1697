"""How good a policy is on held-out examples: one greedy answer each, scored by the task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from scipy import stats
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config import Settings
from vlm_grpo.data import load_examples
from vlm_grpo.engine.sampling import SamplingSettings
from vlm_grpo.errors import UserError
from vlm_grpo.policy import Policy, load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example, Score

CHUNK = 256
"""Examples whose images are in memory at once."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of n examples.

    Attributes:
        headline: name of the task's headline metric.
        n: number of examples.
        metrics: mean of every reward and metric by name, over the examples where it is defined,
            and the task's corpus metrics; ``answered`` is the share with an answer.
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
    policy: Policy, task: Task, examples: Sequence[Example], settings: Settings
) -> Evaluation:
    """One completion for each example at ``evaluation.temperature``, scored.

    What is sampled for an example depends on the seed and its place among the examples alone.
    """
    rollout, evaluation = settings.rollout, settings.evaluation
    restriction = replace(policy.restriction, temperature=evaluation.temperature)
    sampling = SamplingSettings(restriction, rollout.max_completion_length, rollout.stop)
    completions: list[Completion] = []
    for start in range(0, len(examples), CHUNK):
        chunk = [policy.with_seen_sizes(e) for e in examples[start : start + CHUNK]]
        prompts = [policy.prompt(example, task) for example in chunk]
        seeds = [(settings.seed, "evaluation", start + i) for i in range(len(chunk))]
        drawn = policy.sample(prompts, sampling, 1, seeds, evaluation.max_tokens_per_batch)
        completions += [members[0] for members in drawn]
        policy.forget_images()
    seen = [policy.with_seen_sizes(example) for example in examples]
    texts = [completion.text for completion in completions]
    scores = [task.score(text, example) for text, example in zip(texts, seen, strict=True)]
    return summarise(task, seen, texts, scores, settings.seed)


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
    metrics |= task.corpus_metrics([score.answer for score in scores], examples)
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
    interval = bootstrap_interval(columns[task.headline], seed)
    return Evaluation(task.headline, len(scores), metrics, interval, rows)


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean, from 2,000 resamples."""
    if len(set(values)) < 2:  # nothing varies: the bootstrap has nothing to say
        return values[0], values[0]
    result = stats.bootstrap(
        (np.asarray(values),),
        np.mean,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(seed),
        batch=100,
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


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
    found = evaluate_policy(policy, replace(task, frame=policy.frame), examples, settings)
    path = settings.run_dir / "evaluation" / f"{checkpoint.name if checkpoint else 'model'}.jsonl"
    write_predictions(path, found)
    accelerator.print(f"{found}\n")
    for name, value in found.metrics.items():
        accelerator.print(f"  {name:<24} {value:.4f}")
    accelerator.print(f"\npredictions in {path}")
    return found


def write_predictions(path: Path, evaluation: Evaluation) -> None:
    """A line for each example with its output, answer, rewards and metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in evaluation.rows)
    path.write_text("".join(lines), encoding="utf-8")
