"""Settings that accept Python objects: the class of a task, and rows of data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, PlainSerializer, PlainValidator, ValidationInfo
from pydantic_core import to_jsonable_python

from vlm_grpo.task import Task
from vlm_grpo.task.names import get_options, get_task_name
from vlm_grpo.types import Example

IN_MEMORY = "<in memory: "
"""Start of the text that replaces rows in saved settings."""

_REMEDIES = {
    "DataFrame": 'give df.to_dict("records")',
    "IterableDataset": "give list(dataset)",
    "generator": "give list(rows)",
    "dict": 'give one split of a DatasetDict, as ds["train"], or Dataset.from_dict(columns)',
    "DatasetDict": 'give one split, as ds["train"]',
}
"""Remedy by the name of a type that is not a source, whose library is not imported here."""


class Rows(Protocol):
    """Data in memory: mappings as in a ``.jsonl`` file, a ``datasets.Dataset``, or ``Example``s."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class InMemoryRows:
    """Rows in memory, which are shown and saved as a short text."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InMemoryRows) and self.rows is other.rows

    def __hash__(self) -> int:
        return id(self.rows)

    def __repr__(self) -> str:
        return f"{IN_MEMORY}{len(self)} rows>"


def is_rows(value: Any) -> bool:
    """Return whether a value is data in memory, not yet as ``InMemoryRows``.

    Only its first row is checked.
    """
    if isinstance(value, str | Mapping | InMemoryRows):
        return False
    try:
        if len(value) == 0 or hasattr(value, "cast_column"):  # a Dataset in any format
            return True
        return isinstance(next(iter(value)), Mapping | Example)
    except (TypeError, StopIteration):
        return False


def restore(value: Any, info: ValidationInfo) -> Any:
    """Take the object that a text replaces in validated JSON, or return the value itself."""
    return info.context.pop(value, value) if info.context and isinstance(value, str) else value


def restore_nested(value: Any, info: ValidationInfo) -> Any:
    """Restore the objects in mappings and lists at any depth."""
    if isinstance(value, dict):
        return {key: restore_nested(item, info) for key, item in value.items()}
    if isinstance(value, list):
        return [restore_nested(item, info) for item in value]
    return restore(value, info)


def describe_object(value: Any) -> str:
    """Return a text for an object in saved settings, equal in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def split_task(settings: Any) -> None:
    """Replace a task object in the block's ``task`` with its class and ``task_options``."""
    if isinstance(task := settings.task, Task):
        # Not before validation: pydantic would then no longer treat the values as JSON.
        options = {**get_options(task), **settings.task_options}
        object.__setattr__(settings, "task", type(task))
        object.__setattr__(settings, "task_options", options)


def _validate_task(value: Any, info: ValidationInfo) -> Any:
    value = restore(value, info)
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Task) or (isinstance(value, type) and issubclass(value, Task)):
        return value
    raise ValueError("should be text, a subclass of Task or a task")


def to_source(value: Any) -> str | InMemoryRows:
    """Return a data source by name, or rows in memory as ``InMemoryRows``.

    Raises:
        ValueError: the value is neither; the message names the remedy.
    """
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, InMemoryRows):
        return value
    if is_rows(value):
        return InMemoryRows(value)
    if isinstance(value, dict) and "hf" in value:  # YAML reads "hf: x" and "hf:" as a mapping
        raise ValueError("names no dataset: write hf:NAME[:SPLIT[:CONFIG]], without a space")
    problem = "should be text or a list of rows (mappings), a Dataset, or Examples"
    remedy = _REMEDIES.get(type(value).__name__)
    raise ValueError(f"{problem}: {remedy}" if remedy else problem)


def _validate_source(value: Any, info: ValidationInfo) -> Any:
    return to_source(restore(value, info))


def _validate_optional_source(value: Any, info: ValidationInfo) -> Any:
    return None if value is None else _validate_source(value, info)


def _dump_optional_source(source: Any) -> str | None:
    return None if source is None else str(source)


def _dump_options(options: dict[str, Any]) -> Any:
    return to_jsonable_python(options, fallback=describe_object)


TaskOptions = Annotated[
    dict[str, Any],
    AfterValidator(restore_nested),
    PlainSerializer(_dump_options, when_used="json"),
]
"""Options of a task by name."""
TaskSetting = Annotated[
    str | type[Task] | Task,
    PlainValidator(_validate_task),
    PlainSerializer(get_task_name, return_type=str),
]
"""A task by name, file or class. ``Settings`` replaces a task object with its class and options."""
Source = Annotated[
    str | Path | Rows,
    PlainValidator(_validate_source),
    PlainSerializer(str, return_type=str),
]
"""The name of a data source, or rows in memory."""
OptionalSource = Annotated[
    str | Path | Rows | None,
    PlainValidator(_validate_optional_source),
    PlainSerializer(_dump_optional_source, return_type=str | None),
]
"""A ``Source`` or None. Not ``Source | None``, whose description would hold the validators."""
