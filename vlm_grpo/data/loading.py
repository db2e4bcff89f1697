"""Loading of data as checked examples: of one source, and of the sources of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from vlm_grpo.config.data import PYTHON, DataSettings, SourceSettings, Split, is_mixture
from vlm_grpo.config.run import Settings
from vlm_grpo.data.formats import open_source
from vlm_grpo.data.images import MediaReader
from vlm_grpo.data.objects import NO_OBJECTS, Objects, Rows, TaskObject, check_rows
from vlm_grpo.data.rows import Row, to_example
from vlm_grpo.data.store import ExampleStore, ExampleView
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.task import Task
from vlm_grpo.task.registry import SET_BY_LIBRARY, load_task
from vlm_grpo.task.rewards import Rule
from vlm_grpo.types import Example

logger = logging.getLogger(__name__)

_MAX_LISTED = 50  # Bad rows listed in one message; the rest are only counted


def load_examples(
    source: str | Path | Rows, task: Task, data: DataSettings | None = None, split: Split = "eval"
) -> Sequence[Example]:
    """Load all examples of a source and check each of them.

    Only the headers of the images are read, not their pixels.

    Args:
        source: as for ``vlm_grpo.data.formats.open_source``, or rows (mappings, a
            ``datasets.Dataset`` or ``Example``s).
        task: the task that checks the form of each answer and writes each prompt.
        data: image root, limits and the treatment of bad rows; None: the defaults.
        split: selects the limit, and the split of a source that has several.

    Raises:
        UserError: the source cannot be read, has no examples, or has bad rows (all are named)
            while ``data.on_bad_row`` is "error".
    """
    if isinstance(source, str | Path):
        own, rows = SourceSettings(source=str(source)), None
    else:
        check_rows("the data source", source)
        own, rows = SourceSettings(source=PYTHON), source
    data = DataSettings(train=own.source) if data is None else data
    return load_source(data.complete(own, split), task, data, split, rows=rows)


def load_source(
    source: SourceSettings,
    task: Task,
    data: DataSettings,
    split: Split,
    label: str = "",
    rows: Rows | None = None,
) -> Sequence[Example]:
    """Load all examples of a source with settings of its own, as ``load_examples`` does.

    ``task`` may be a mixture of the tasks that the rows name, ``label`` is the source's name in a
    mixture, and ``rows`` are those of a source that is a Python object.
    """
    examples, problems = read_source(source, task, data, split, label, rows)
    name, count = str(source.source), len(problems)
    bad = "1 bad row" if count == 1 else f"{count} bad rows"
    if problems and (data.on_bad_row == "error" or not examples):
        remedy = "fix them; training can skip them with data.on_bad_row=skip"
        raise UserError(
            f"{name} has {bad} (good rows: {len(examples)}):\n"
            f"{bullets(problems, _MAX_LISTED)}\n{remedy if examples else 'fix them'}"
        )
    if problems:
        listed = bullets(problems, 5)
        logger.warning("%s: skipped %s, kept %d:\n%s", name, bad, len(examples), listed)
    if not examples:
        raise UserError(f"{name} has no examples")
    return examples


def read_source(
    source: SourceSettings,
    task: Task,
    data: DataSettings,
    split: Split,
    label: str = "",
    given: Rows | None = None,
) -> tuple[Sequence[Example], list[str]]:
    """Return the good rows of a source as examples, and one problem for each bad row."""
    limit, columns = source.limit, dict(source.columns)
    name = source.source if given is None else given
    rows, folders, is_memory = open_source(name, task, limit, split)
    if source.image_root is not None:
        folders = [source.image_root, *folders]
    reader = MediaReader(folders, data.max_image_pixels, data.video)
    task_column = columns.pop("task", None)
    examples = [] if is_memory else ExampleStore()
    problems: list[str] = []
    first_with_id: dict[str, int] = {}
    for row in rows:
        if limit is not None and len(examples) >= limit:
            break
        try:
            name, row_task = "", task
            if source.default_question is not None:
                row = replace(row, question=source.default_question)
            if task_column is not None:
                name, row_task, row = _pop_task(row, task_column, task)
            example = to_example(row, columns, reader, row_task)
            first = first_with_id.setdefault(example.id, len(examples))
            if first < len(examples):
                where = examples[first].location or f"example {first + 1}"
                raise ValueError(f"id {example.id!r} is a duplicate of {where}")
        except ValueError as error:
            problems.append(f"{row.location}: {error}")
            continue
        if label:
            name = f"{label}/{name}" if name else label
            example = replace(example, id=f"{label}/{example.id}", source=name)
        examples.append(example)
    if isinstance(examples, ExampleStore):
        examples.flush()
    return examples, problems


def _pop_task(row: Row, column: str, task: Task) -> tuple[str, Task, Row]:
    """Return the name of the task that a row names, that task, and the row without the name."""
    if row.problem is not None:
        raise ValueError(row.problem)
    values = dict(row.values)
    if not isinstance(name := values.pop(column, None), str):
        raise ValueError(f"its column {column} must name its task")
    name, part = task.resolve(Example("", (), "", None, source=name))
    return name, part, replace(row, values=values)


# The sources of a run, each of which may have a task of its own.


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
    """Yield the tasks of a source, each with the ``Example.source`` of its examples."""
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

    A mixture as ``task`` gives the examples the names of their sources. Errors are those of
    ``load_examples``.
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
    return ExampleView(*parts)
