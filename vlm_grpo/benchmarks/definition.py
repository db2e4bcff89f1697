"""Definitions of benchmarks, YAML files in ``configs/benchmarks``, and tasks adapted to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from vlm_grpo.config.section import Frozen
from vlm_grpo.errors import UserError, bullets, nearest
from vlm_grpo.task import Task, metric
from vlm_grpo.task.coordinates import CoordinateFrame
from vlm_grpo.task.registry import build_task, load_task_class
from vlm_grpo.tasks.graders.official_metrics import CORPUS_RULES, RULES
from vlm_grpo.tasks.graders.official_parsers import READERS
from vlm_grpo.types import Example
from vlm_grpo.utils import trust

_FOLDER: Any = resources.files("vlm_grpo.configs") / "benchmarks"
ERROR_METRICS = (
    *("absolute_error", "rmse", "mae", "rmse_all", "cer", "cer_micro", "wer_micro"),
    *("edit_distance", "order_distance"),
)
"""Metrics for which lower is better."""

_CORPUS_METRICS = (
    *("ap", "ap_50", "ap_75", "rmse", "category_mean", "edit_distance", "order_distance"),
    *("mask_giou", "mask_ciou", "n_acc", "t_acc"),
)
"""Corpus metrics of the built-in tasks that a benchmark may name."""


def build_benchmark_task(
    base: type[Task],
    prompt: str = "{question}",
    metrics: Sequence[str] = (),
    reader: str | None = None,
) -> type[Task]:
    """Return a subclass of a task with the prompt, the metrics and the reader of a benchmark.

    ``metrics`` are rewards or metrics of ``base``, or rules of ``graders/official_metrics.py``; the
    first becomes the primary metric. Without ``reader``, a key of ``READERS``, the parser of
    ``base`` also reads an answer in ``<answer>`` tags that were not asked for.
    """

    def read(self: Task, text: str, example: Example) -> Any | None:
        if reader is not None:
            return READERS[reader](self.thinking_tags.normalize(text), example, self)
        tags = self.tags or "<answer>" in text
        return base.read(self if tags == self.tags else replace(self, tags=tags), text, example)

    def question(self: Task, example: Example) -> str:
        question = prompt.replace("{question}", example.question)
        return base.question(self, replace(example, question=question))

    def corpus_metrics(
        self: Task, answers: Sequence[Any | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        values = base.corpus_metrics(self, answers, examples)
        own = {m: CORPUS_RULES[m](answers, examples) for m in metrics if m in CORPUS_RULES}
        return {**values, **own}

    def reduce(self: Task) -> tuple[Callable[..., Task], tuple[Any, ...]]:
        names = [field.name for field in fields(self) if field.init]
        options = {name: getattr(self, name) for name in names}
        return _rebuild, (options, base, prompt, tuple(metrics), reader)

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
    return name in ERROR_METRICS or (name == base.primary_metric and base.lower_is_better)


def _rebuild(options: dict[str, Any], *arguments: Any) -> Task:
    return build_benchmark_task(*arguments)(**options)


def _build_method(name: str) -> Callable[[Task, Any, Example], float]:
    def rule(self: Task, answer: Any, example: Example) -> float:
        return float(RULES[name](answer, example))

    rule.__qualname__ = name
    marked = metric()(rule)
    marked.rule = replace(marked.rule, needs_answer=False)  # an output without one has a value too
    return marked


class Published(Frozen):
    """A published result on a benchmark."""

    model: str  # and how it was run if that matters
    value: float  # in the benchmark's unit (see ``Benchmark.scale``)
    split: str  # one of the benchmark's splits
    source: str  # a paper and its table, or a page of a repository
    verified: bool = False  # the number was compared with the source


class Benchmark(Frozen):
    """Prompt and scoring of a public benchmark."""

    title: str
    # module of ``vlm_grpo.data_scripts`` that converts its published files
    converter: str | None = None
    task: str
    options: dict[str, Any] = Field(default_factory=dict)  # of the task
    prompt: str = "{question}"  # template of the question; the task adds how to answer
    asked: str = ""  # what models of published results were asked to write, and by whose prompt
    # parser of the official script, a key of ``READERS``; None: that of the task
    reader: str | None = None
    differences: str = ""  # how and why results can differ from the official script's
    # the official one: a reward or metric of the task, or a rule of ``official_metrics``
    metric: str
    variants: tuple[str, ...] = ()  # other metrics to report
    # from a mean to the published unit: 100 for percent, 1000 for points of OCRBench
    scale: float = 100.0
    # groupings to report: keys of meta, "answer", "size" or "size_128"
    groups: tuple[str, ...] = ()
    # splits with published results, and their number of examples; None: unknown
    splits: dict[str, int | None] = Field(default_factory=dict)
    published: tuple[Published, ...] = ()  # results to print for comparison
    note: str = ""  # on comparing results

    @model_validator(mode="after")
    def _check(self) -> Benchmark:
        task = load_task_class(self.task)
        own = *task.rules("reward"), *task.rules("metric")
        metrics = {*RULES, *CORPUS_RULES, *own, *_CORPUS_METRICS}
        for kind, name, known in (
            *(("metric", name, metrics) for name in (self.metric, *self.variants)),
            ("reader", self.reader, READERS),
        ):
            if name is not None and name not in known:
                raise ValueError(f"there is no {kind} {name}{nearest(name, known)}")
        if "{question}" not in self.prompt:
            raise ValueError("prompt must contain {question}")
        if unknown := sorted({p.split for p in self.published} - set(self.splits)):
            raise ValueError(f"published results are of unknown splits: {', '.join(unknown)}")
        return self

    def load_task(self, frame: CoordinateFrame | None = None, **options: Any) -> Task:
        """Build the task with this benchmark's prompt and metrics, ``metric`` as its primary one.

        ``frame`` is that of the model; ``options`` of the task have precedence over those of the
        benchmark.
        """
        base = load_task_class(self.task)
        metrics = (self.metric, *self.variants)
        task = build_benchmark_task(base, self.prompt, metrics, self.reader)
        frames = {} if frame is None else {"frame": frame}
        plain = {"instruction": None}  # the benchmark's prompt says how to answer
        return build_task(task, self.task, {**plain, **frames, **self.options, **options})

    @property
    def lower_is_better(self) -> bool:
        return is_error_metric(load_task_class(self.task), self.metric)

    @property
    def places(self) -> int:
        return 1 if self.scale > 1 else 3


def benchmark_names() -> list[str]:
    return sorted(file.name[:-5] for file in _FOLDER.iterdir() if file.name[-5:] == ".yaml")


def load_benchmark(name: str) -> Benchmark:
    """Load a benchmark by name, or from a user's ``.yaml`` file."""
    if name in benchmark_names():
        text = _FOLDER.joinpath(f"{name}.yaml").read_text("utf-8")
    elif name.endswith(".yaml") and Path(name).is_file():
        text = Path(name).read_text("utf-8")
    else:
        raise UserError(
            f"there is no benchmark {name!r}{nearest(name, benchmark_names())}: "
            f"give one of {', '.join(benchmark_names())}, or the path of a .yaml file"
        )
    try:
        content = yaml.safe_load(text)
        if not isinstance(content, Mapping):
            raise UserError(f"benchmark {name} must be a mapping of keys")
        if name not in benchmark_names():
            trust.note(content, name)
        return Benchmark.model_validate(content)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UserError(f"benchmark {name} is invalid:\n{bullets(problems)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"benchmark {name} is not valid YAML: {error}") from error
