"""Adapt the task of a benchmark's rows to the benchmark's prompt and official metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from vlm_grpo.benchmarks.official import READERS
from vlm_grpo.benchmarks.rules import CORPUS_RULES, RULES, apply_rule, get_group
from vlm_grpo.task import Task
from vlm_grpo.task.rewards import metric
from vlm_grpo.types import Example

ERROR_METRICS = frozenset(
    [
        *("absolute_error", "rmse", "mae", "rmse_all", "cer", "cer_micro", "wer_micro"),
        *("edit_distance", "order_distance"),
    ]
)
"""Metrics for which lower is better."""


def build_benchmark_task(
    base: type[Task],
    prompt: str = "{question}",
    metrics: Sequence[str] = (),
    group: str | None = None,
    reader: str | None = None,
) -> type[Task]:
    """Return a subclass of a task with the prompt, the metrics and the reader of a benchmark.

    Args:
        base: the task of the rows; it scores answers.
        prompt: the question's template, with ``{question}`` in it.
        metrics: rewards or metrics of ``base``, or rules of ``benchmarks.rules``; the first is the
            official one and becomes the primary metric. Empty: those of ``base``.
        group: the official metric, a rule of single answers, is the mean of the means of these
            groups; None: the mean over examples.
        reader: a key of ``READERS``; None: the parser of ``base``, which also reads an answer in
            ``<answer>`` tags that were not asked for.
    """

    def read(self: Task, text: str, example: Example) -> Any | None:
        if reader is not None:
            return READERS[reader].read(self.thinking_tags.normalize(text), example, self)
        tags = self.tags or "<answer>" in text
        return base.read(self if tags == self.tags else replace(self, tags=tags), text, example)

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
        names = [field.name for field in fields(self) if field.init]
        options = {name: getattr(self, name) for name in names}
        return _rebuild, ((base, prompt, tuple(metrics), group, reader), options)

    members = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__reduce__": reduce,  # another process, which lacks this class, creates it again
        "primary_metric": metrics[0] if metrics else base.primary_metric,
        "lower_is_better": is_error_metric(base, metrics[0] if metrics else base.primary_metric),
        "read": read,
        "question": question,
        "corpus_metrics": corpus_metrics,
        **{name: _build_method(name) for name in metrics if name in RULES},
    }
    return type(base.__name__, (base,), members)


def is_error_metric(base: type[Task], name: str) -> bool:
    """Return whether lower is better for a metric of a task."""
    return name in ERROR_METRICS or (name == base.primary_metric and base.lower_is_better)


def _rebuild(arguments: Sequence[Any], options: dict[str, Any]) -> Task:
    return build_benchmark_task(*arguments)(**options)


def _build_method(name: str) -> Callable[[Task, Any, Example], float]:
    """Return a metric that calls a rule, for outputs without an answer too."""

    def rule(self: Task, answer: Any, example: Example) -> float:
        return float(RULES[name](answer, example))

    rule.__qualname__ = name
    marked = metric()(rule)
    marked.rule = replace(marked.rule, needs_answer=False)
    return marked


def mean_over_groups(values: Sequence[float], groups: Sequence[str]) -> float:
    """Return the mean of the means of the groups."""
    means = [
        np.mean([value for value, other in zip(values, groups, strict=True) if other == group])
        for group in dict.fromkeys(groups)
    ]
    return float(np.mean(means))
