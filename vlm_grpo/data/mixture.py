"""Runs with several sources of examples, each of which may have a task of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from vlm_grpo.config.data import SourceSettings, Split, is_mixture
from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import load_source
from vlm_grpo.data.objects import NO_OBJECTS, Objects, TaskObject
from vlm_grpo.data.store import JoinedExamples
from vlm_grpo.task import Task
from vlm_grpo.task.registry import SET_BY_LIBRARY, load_task
from vlm_grpo.task.rewards import Rule
from vlm_grpo.types import Example


def _forward(name: str) -> Any:
    """Return a method that calls that of the task of its example, which is among its arguments."""

    def call(self: Mixed, *args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        example = next(value for value in given if isinstance(value, Example))
        return getattr(self.resolve(example)[1], name)(*args, **options)

    call.__name__ = name
    return call


class Mixed(Task):
    """Several tasks as one: each example has the task of its source.

    Rewards and metrics are named ``SOURCE/NAME``. The primary metric is the mean of the sources'
    primary metrics, in which an error e counts as 1 − e.
    """

    primary_metric = "score"
    # task of each source by ``Example.source``
    members: Mapping[str, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        common = {name: getattr(self, name) for name in SET_BY_LIBRARY}
        members = {name: replace(task, **common) for name, task in self.members.items()}
        object.__setattr__(self, "members", members)

    def resolve(self, example: Example) -> tuple[str, Task]:
        """Return the name of the example's source and its task.

        Raises:
            ValueError: no task has this source.
        """
        if example.source not in self.members:
            raise ValueError(f"its source {example.source!r} is none of {', '.join(self.members)}")
        return example.source, self.members[example.source]

    question, prompt, instructions = map(_forward, ("question", "prompt", "instructions"))
    parse, read, write, check = map(_forward, ("parse", "read", "write", "check"))
    draw, target_image = map(_forward, ("draw", "target_image"))
    gold, gold_reward, gold_answer = map(_forward, ("gold", "gold_reward", "gold_answer"))

    def reward_weights(self) -> dict[str, float]:
        return self._join({name: task.reward_weights() for name, task in self.members.items()})

    def reward_rules(self) -> dict[str, Rule]:
        return self._join({name: task.reward_rules() for name, task in self.members.items()})

    def _join(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {f"{source}/{name}": v for source, own in values.items() for name, v in own.items()}


def load_run_task(settings: Settings, objects: Objects = NO_OBJECTS) -> Task:
    """Load the task of a run: that of its settings, or the mixture of its sources' tasks.

    Python objects are loaded in place of what the settings name (``Objects.name_in``).

    Raises:
        UserError: a task cannot be loaded, as for ``load_task``.
    """
    if not is_mixture(settings.data.train):
        return _load_task(objects.get_task(""), settings.task, settings.task_options)
    sources = settings.data.get_sources("train")
    return Mixed(members={n: t for s in sources for n, t in load_members(s, settings, objects)})


def _load_task(given: TaskObject | None, name: str, options: Mapping[str, Any]) -> Task:
    """Load a task by name, or take an object; its class has the options of the settings."""
    return given if isinstance(given, Task) else load_task(given or name, **options)


def load_members(
    source: SourceSettings, settings: Settings, objects: Objects = NO_OBJECTS
) -> Iterator[tuple[str, Task]]:
    """Yield the tasks of a source, each with the ``Example.source`` of its examples.

    Raises:
        UserError: a task cannot be loaded, as for ``load_task``.
    """
    given = objects.get_task(source.label)
    if source.tasks:
        for name, options in source.tasks.items():
            yield f"{source.label}/{name}", load_task(name, **options)
    elif source.task is None:
        options = {**settings.task_options, **source.task_options}
        yield source.label, _load_task(given, settings.task, options)
    else:
        own = given if isinstance(objects.task, Mapping) else None
        yield source.label, _load_task(own, source.task, source.task_options)


def load_split(
    settings: Settings, task: Task, split: Split, objects: Objects = NO_OBJECTS
) -> Sequence[Example]:
    """Load the training or the held-out examples of a run from all of their sources.

    Args:
        settings: the run's settings.
        task: the task of the examples: a mixture gives them the names of their sources.
        split: the split.
        objects: rows of sources that are Python objects.

    Raises:
        UserError: a source cannot be read or has bad rows, as for ``load_examples``.
    """
    if not isinstance(task, Mixed):
        (source,) = settings.data.get_sources(split)
        rows = objects.get_rows(split, source.label)
        return load_source(source, task, settings.data, split, rows=rows)
    parts = []
    for source in settings.data.get_sources(split):
        label, members = source.label, task.members
        if source.tasks:
            own = Mixed(members={name: members[f"{label}/{name}"] for name in source.tasks})
        else:
            own = members[label]
        rows = objects.get_rows(split, label)
        parts.append(load_source(source, own, settings.data, split, label, rows))
    return JoinedExamples(parts)
