"""Benchmark definitions: small declarative files in ``configs/benchmarks``, checked when read."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from vlm_grpo.benchmarks.adapter import as_benchmark_task, is_error
from vlm_grpo.benchmarks.rules import CORPUS_RULES, RULES
from vlm_grpo.config.base import Frozen
from vlm_grpo.coordinates import FRAMES, CoordinateFrame
from vlm_grpo.errors import UserError, bullets, nearest
from vlm_grpo.registry import build_task, load_task_class
from vlm_grpo.task import Task


class Published(Frozen):
    """A number that somebody published on a benchmark."""

    model: str
    """The model, and how it was run where that matters."""
    value: float
    """In the benchmark's unit (see ``Benchmark.scale``)."""
    split: str
    """One of the benchmark's splits."""
    source: str
    """Where it stands: a paper and its table, a repository's page."""
    verified: bool = False
    """Somebody compared it with the source."""


class Benchmark(Frozen):
    """How one public benchmark is asked and scored."""

    title: str
    """Its name as people write it."""
    converter: str | None = None
    """Module of ``vlm_grpo.data_scripts`` that reads its published files; None: none does."""
    task: str
    """The task that its rows are for."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task."""
    prompt: str = "{question}"
    """The question as it is asked, before the task adds how to answer; has ``{question}``."""
    frame: str | None = None
    """Frame in which boxes are written; None: the model family's own."""
    metric: str
    """The official metric: a reward or metric of the task, or a rule of ``benchmarks.rules``."""
    variants: tuple[str, ...] = ()
    """Other metrics to report beside it."""
    average: Literal["examples", "groups"] = "examples"
    """Mean over examples, or over the means of the groups of ``groups[0]``."""
    scale: float = 100.0
    """What a mean of 1 is written as: 100 for percent, 1000 for OCRBench's points."""
    groups: tuple[str, ...] = ()
    """Tables to report: keys of meta, "answer", "size" or "size_128"."""
    splits: dict[str, int | None] = Field(default_factory=dict)
    """The splits that results are published on, with their number of examples if it is known."""
    published: tuple[Published, ...] = ()
    """Numbers to print beside ours."""
    note: str = ""
    """What to know before comparing numbers."""

    @model_validator(mode="after")
    def _sound(self) -> Benchmark:
        known = {*RULES, *CORPUS_RULES, *_task_metrics(self.task)}
        for name in (self.metric, *self.variants):
            if name not in known:
                raise ValueError(f"there is no metric {name}{nearest(name, known)}")
        if "{question}" not in self.prompt:
            raise ValueError("prompt must hold {question}")
        if self.frame is not None and self.frame not in FRAMES:
            raise ValueError(f"there is no frame {self.frame}{nearest(self.frame, FRAMES)}")
        if self.average == "groups" and not self.groups:
            raise ValueError("average: groups needs groups, whose first is the one meant")
        if self.average == "groups" and self.metric not in RULES:
            raise ValueError(f"average: groups needs a rule as its metric: {', '.join(RULES)}")
        if lost := sorted({p.split for p in self.published} - set(self.splits)):
            raise ValueError(f"published numbers are of splits that it has not: {', '.join(lost)}")
        return self

    def load_task(self, frame: CoordinateFrame | None = None, **options: Any) -> Task:
        """The task that asks and counts as this benchmark does; its primary metric is ``metric``.

        Args:
            frame: the model's; the benchmark's own comes first.
            options: options of the task, over the benchmark's own.
        """
        base = load_task_class(self.task)
        group = self.groups[0] if self.average == "groups" else None
        task = as_benchmark_task(base, self.prompt, (self.metric, *self.variants), group)
        own = frame if self.frame is None else FRAMES[self.frame]
        frames = {} if own is None else {"frame": own}
        return build_task(task, self.task, {**frames, **self.options, **options})

    @property
    def lower_is_better(self) -> bool:
        """The official metric is an error."""
        return is_error(load_task_class(self.task), self.metric)


_CORPUS_METRICS = frozenset(("ap", "ap_50", "ap_75", "rmse"))
"""What the built-in tasks' ``corpus_metrics`` return and a benchmark may name."""


def _task_metrics(task: str) -> set[str]:
    found = load_task_class(task)
    return {*found.rules("reward"), *found.rules("metric"), *_CORPUS_METRICS}


def benchmark_names() -> list[str]:
    """Names of the benchmarks that the package brings along."""
    return sorted(file.name[:-5] for file in _folder().iterdir() if file.name[-5:] == ".yaml")


def load_benchmark(name: str) -> Benchmark:
    """A benchmark by name, or from a ``.yaml`` file of the user's.

    Raises:
        UserError: there is none of that name, or its definition is wrong; everything is named.
    """
    if name in benchmark_names():
        text = _folder().joinpath(f"{name}.yaml").read_text("utf-8")
    elif name.endswith(".yaml") and Path(name).is_file():
        text = Path(name).read_text("utf-8")
    else:
        names = benchmark_names()
        raise UserError(
            f"there is no benchmark {name!r}{nearest(name, names)}: "
            f"give one of {', '.join(names)}, or the path of a .yaml file"
        )
    try:
        content = yaml.safe_load(text)
        if not isinstance(content, Mapping):
            raise UserError(f"benchmark {name} must be a mapping of keys")
        return Benchmark.model_validate(content)
    except yaml.YAMLError as error:
        raise UserError(f"benchmark {name} is no YAML: {error}") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise UserError(f"benchmark {name} is wrong:\n{bullets(problems)}") from error


def _folder() -> Any:
    return resources.files("vlm_grpo.configs") / "benchmarks"
