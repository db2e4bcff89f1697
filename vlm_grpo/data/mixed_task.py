"""Mixtures: several sources, each with a task of its own, as one task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any, Self

from vlm_grpo.config.data import SourceSettings, is_mixture
from vlm_grpo.config.run import Settings
from vlm_grpo.data.objects import NO_OBJECTS, Objects, TaskObject
from vlm_grpo.task import Rule, Task
from vlm_grpo.task.registry import SET_BY_LIBRARY, load_task
from vlm_grpo.types import Example


def _forward(name: str) -> Any:
    """Return a method that calls that of the task of its example, which is among its arguments."""

    def call(self: Mixed, *args: Any, **options: Any) -> Any:
        example = next(v for v in (*args, *options.values()) if isinstance(v, Example))
        return getattr(self.resolve(example)[1], name)(*args, **options)

    return call


class Mixed(Task):
    """Several tasks as one: each example has the task of its source.

    Rewards and metrics are named ``SOURCE/NAME``. The primary metric is the mean of the sources'
    primary metrics, in which an error e counts as 1 − e.
    """

    primary_metric = "score"
    members: Mapping[str, Task] = field(default_factory=dict)  # by ``Example.source``

    def __post_init__(self) -> None:
        super().__post_init__()
        common = {name: getattr(self, name) for name in SET_BY_LIBRARY}
        members = {name: replace(task, **common) for name, task in self.members.items()}
        object.__setattr__(self, "members", members)

    def resolve(self, example: Example) -> tuple[str, Task]:
        """Return the name of the example's source and its task; ``ValueError``: it has none."""
        if example.source not in self.members:
            raise ValueError(f"its source {example.source!r} is none of {', '.join(self.members)}")
        return example.source, self.members[example.source]

    def without_tools(self) -> Self:
        return replace(self, members={n: t.without_tools() for n, t in self.members.items()})

    question, prompt, instructions = map(_forward, ("question", "prompt", "instructions"))
    parse, read, write, check = map(_forward, ("parse", "read", "write", "check"))
    draw, gold_boxes, target_image = map(_forward, ("draw", "gold_boxes", "target_image"))
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
    """
    if not is_mixture(settings.data.train):
        return _load_task(objects.task, settings.task, settings.task_options)
    sources = settings.data.get_sources("train")
    return Mixed(members={n: t for s in sources for n, t in load_members(s, settings, objects)})


def _load_task(given: TaskObject | None, name: str, options: Mapping[str, Any]) -> Task:
    return given if isinstance(given, Task) else load_task(given or name, **options)


def load_members(
    source: SourceSettings, settings: Settings, objects: Objects = NO_OBJECTS
) -> Iterator[tuple[str, Task]]:
    """Yield the tasks of a source, each with the ``Example.source`` of its examples."""
    if source.tasks:
        for name, options in source.tasks.items():
            yield f"{source.label}/{name}", load_task(name, **options)
    elif source.task is None:
        options = {**settings.task_options, **source.task_options}
        yield source.label, _load_task(objects.task, settings.task, options)
    else:
        yield source.label, load_task(source.task, **source.task_options)
