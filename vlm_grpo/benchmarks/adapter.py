"""Adapt the task of a benchmark's rows to the benchmark's prompt and official metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from vlm_grpo.benchmarks.rules import CORPUS_RULES, RULES, apply_rule, get_group
from vlm_grpo.task import Task, metric
from vlm_grpo.types import Example

ERROR_METRICS = frozenset(("absolute_error", "rmse", "cer", "cer_micro", "wer_micro"))
"""Metrics for which lower is better."""


def build_benchmark_task(
    base: type[Task], prompt: str, metrics: Sequence[str], group: str | None = None
) -> type[Task]:
    """Return a subclass of a task with the prompt and the metrics of a benchmark.

    Args:
        base: the task of the rows; it parses and scores answers.
        prompt: the question's template, with ``{question}`` in it.
        metrics: rewards or metrics of ``base``, or rules of ``benchmarks.rules``; the first is the
            official one and becomes the primary metric.
        group: the official metric, a rule of single answers, is the mean of the means of these
            groups; None: the mean over examples.
    """

    def question(self: Task, example: Example) -> str:
        question = prompt.replace("{question}", example.question)
        return base.question(self, replace(example, question=question))

    def corpus_metrics(
        self: Task, answers: Sequence[Any | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        values = base.corpus_metrics(self, answers, examples)
        values |= {m: CORPUS_RULES[m](answers, examples) for m in metrics if m in CORPUS_RULES}
        if group is not None:
            scores = apply_rule(metrics[0], answers, examples)
            values[metrics[0]] = mean_over_groups(scores, [get_group(group, e) for e in examples])
        return values

    def reduce(self: Task) -> tuple[Callable[..., Task], tuple[Any, ...]]:
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuild, (base, prompt, tuple(metrics), group, options)

    members = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__reduce__": reduce,  # another process, which lacks this class, creates it again
        "primary_metric": metrics[0],
        "lower_is_better": is_error_metric(base, metrics[0]),
        "question": question,
        "corpus_metrics": corpus_metrics,
        **{name: metric()(_build_method(name)) for name in metrics if name in RULES},
    }
    return type(base.__name__, (base,), members)


def is_error_metric(base: type[Task], name: str) -> bool:
    """Return whether lower is better for a metric of a task."""
    return name in ERROR_METRICS or (name == base.primary_metric and base.lower_is_better)


def _rebuild(
    base: type[Task],
    prompt: str,
    metrics: Sequence[str],
    group: str | None,
    options: dict[str, Any],
) -> Task:
    return build_benchmark_task(base, prompt, metrics, group)(**options)


def _build_method(name: str) -> Callable[[Task, Any, Example], float]:
    def rule(self: Task, answer: Any, example: Example) -> float:
        return float(RULES[name](answer, example))

    rule.__qualname__ = name
    return rule


def mean_over_groups(values: Sequence[float], groups: Sequence[str]) -> float:
    """Return the mean of the means of the groups."""
    means = [
        np.mean([value for value, other in zip(values, groups, strict=True) if other == group])
        for group in dict.fromkeys(groups)
    ]
    return float(np.mean(means))
