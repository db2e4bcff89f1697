"""A benchmark's prompt and official metric put over the task that its rows are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from vlm_grpo.benchmarks.rules import CORPUS_RULES, RULES, get_group, rule_values
from vlm_grpo.task import Task, metric
from vlm_grpo.types import Example

ERRORS = frozenset(("absolute_error", "rmse", "cer", "cer_micro", "wer_micro"))
"""Metrics of which less is better."""


def as_benchmark_task(
    base: type[Task], prompt: str, metrics: Sequence[str], group: str | None = None
) -> type[Task]:
    """A task that asks and counts as a benchmark does; its primary metric is the first metric.

    Args:
        base: the task that the rows are for; it parses and scores.
        prompt: the question as it is asked, with ``{question}`` in it.
        metrics: official metric first; rewards or metrics of ``base``, or rules of
            ``benchmarks.rules``.
        group: the official metric, a rule of one answer, is the mean over the means of these
            groups; None: the mean over examples.
    """

    def question(self: Task, example: Example) -> str:
        asked = prompt.replace("{question}", example.question)
        return base.question(self, replace(example, question=asked))

    def corpus_metrics(
        self: Task, answers: Sequence[Any | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        found = base.corpus_metrics(self, answers, examples)
        found |= {m: CORPUS_RULES[m](answers, examples) for m in metrics if m in CORPUS_RULES}
        if group is not None:
            values = rule_values(metrics[0], answers, examples)
            found[metrics[0]] = mean_over_groups(values, [get_group(group, e) for e in examples])
        return found

    def reduced(self: Task) -> tuple[Callable[..., Task], tuple[Any, ...]]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuilt, (base, prompt, tuple(metrics), group, values)

    members = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__reduce__": reduced,  # made anew in another process, which does not know this class
        "primary_metric": metrics[0],
        "lower_is_better": is_error(base, metrics[0]),
        "question": question,
        "corpus_metrics": corpus_metrics,
        **{name: metric()(_method(name)) for name in metrics if name in RULES},
    }
    return type(base.__name__, (base,), members)


def is_error(base: type[Task], name: str) -> bool:
    """Whether less of a metric of the task's rows is better."""
    return name in ERRORS or (name == base.primary_metric and base.lower_is_better)


def _rebuilt(
    base: type[Task], prompt: str, metrics: Sequence[str], group: str | None, values: dict[str, Any]
) -> Task:
    return as_benchmark_task(base, prompt, metrics, group)(**values)


def _method(name: str) -> Callable[[Task, Any, Example], float]:
    def rule(self: Task, answer: Any, example: Example) -> float:
        return float(RULES[name](answer, example))

    rule.__qualname__ = name
    return rule


def mean_over_groups(values: Sequence[float], groups: Sequence[str]) -> float:
    """The mean of the groups' means."""
    means = [
        np.mean([value for value, other in zip(values, groups, strict=True) if other == group])
        for group in dict.fromkeys(groups)
    ]
    return float(np.mean(means))
