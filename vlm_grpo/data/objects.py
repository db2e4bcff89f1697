"""Python objects that a program gives in place of the task and the data that settings name."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from vlm_grpo.config.data import PYTHON
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.registry import get_options, get_task_name
from vlm_grpo.types import Example

_REMEDIES = {
    "DataFrame": 'give df.to_dict("records")',
    "IterableDataset": "give list(dataset)",
    "generator": "give list(rows)",
    "dict": 'give one split of a DatasetDict, as ds["train"], or Dataset.from_dict(columns)',
    "DatasetDict": 'give one split, as ds["train"]',
}
"""Remedy by the name of a type that is not rows, whose library is not imported here."""

Rows = Iterable[Any]
"""Data in memory: mappings as in a ``.jsonl`` file, a ``datasets.Dataset``, or ``Example``s."""
TaskObject = Task | type[Task]


@dataclass(frozen=True)
class Objects:
    """A task or its class, and training and held-out rows, that are Python objects."""

    task: TaskObject | None = None
    train: Rows | None = None
    eval: Rows | None = None

    def name_in(self, settings: Settings) -> Settings:
        """Return settings that name the objects, to be saved and to find them again.

        A task object has its own options; a class has those of the settings.
        """
        changes: dict[str, Any] = {}
        if self.task is not None:
            changes |= _name_task(self.task, settings.task_options)
        sources = {}
        for split, rows in (("train", self.train), ("eval", self.eval)):
            if rows is not None:
                check_rows(f"data.{split}", rows)
                sources[split] = PYTHON
        if sources:
            changes["data"] = settings.data.model_copy(update=sources)
        given_values = {name: getattr(settings, name) for name in settings.model_fields_set}
        return Settings(**{**given_values, **changes}) if changes else settings


NO_OBJECTS = Objects()


def check_rows(name: str, rows: object) -> None:
    """Refuse an object that is no rows, with the remedy; only the first row is looked at."""
    if not isinstance(rows, str | Mapping):
        try:
            if len(rows) == 0 or hasattr(rows, "cast_column"):  # type: ignore[arg-type]
                return
            if isinstance(next(iter(rows)), Mapping | Example):  # type: ignore[call-overload]
                return
        except (TypeError, StopIteration):
            pass
    kind = type(rows).__name__
    remedy = f": {_REMEDIES[kind]}" if kind in _REMEDIES else ""
    raise UserError(
        f"{name} should be a list of rows (mappings), a Dataset, or Examples, not {kind}{remedy}"
    )


def _name_task(task: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings ``task`` and ``task_options`` of an object, equal in every process."""
    if isinstance(task, type) and issubclass(task, Task):
        return {"task": get_task_name(task), "task_options": dict(options)}
    if not isinstance(task, Task):
        raise UserError(f"task should be a subclass of Task or a task, not {task!r}")
    own = to_jsonable_python(
        get_options(task), fallback=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    )
    return {"task": get_task_name(type(task)), "task_options": own}
