"""Loading a dataset by name as a list of checked ``Example``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vlm_grpo.config.data import PYTHON, DataSettings, SourceSettings, Split
from vlm_grpo.data.formats import open_source
from vlm_grpo.data.images import MediaReader
from vlm_grpo.data.objects import Rows, check_rows
from vlm_grpo.data.rows import Row, to_example
from vlm_grpo.data.store import ExampleStore
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.task import Task
from vlm_grpo.types import Example

logger = logging.getLogger(__name__)

_MAX_LISTED = 50
"""Bad rows listed in one message; the rest are only counted."""


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
    own, rows = _split_source(source)
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
    """Load all examples of a source with settings of its own; otherwise like ``load_examples``.

    Args:
        source: the source.
        task: the task of its examples; or, if its rows name their tasks, a mixture of these.
        data: the treatment of bad rows.
        split: the split.
        label: name of the source in a mixture; "": it is the only one.
        rows: the rows of a source that is a Python object.
    """
    examples, problems = _read_source(source, task, data, split, label, rows)
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


def read_examples(
    source: str | Path | Rows, task: Task, data: DataSettings, split: Split = "eval"
) -> tuple[Sequence[Example], list[str]]:
    """Return the good rows of a source as examples, and one problem for each bad row.

    It is like ``load_examples``, but bad rows and an empty source are not an error.
    """
    own, rows = _split_source(source)
    return _read_source(data.complete(own, split), task, data, split, given=rows)


def _split_source(source: str | Path | Rows) -> tuple[SourceSettings, Rows | None]:
    """Return a source by name, or as the name of Python objects and these."""
    if isinstance(source, str | Path):
        return SourceSettings(source=str(source)), None
    check_rows("the data source", source)
    return SourceSettings(source=PYTHON), source


def _read_source(
    source: SourceSettings,
    task: Task,
    data: DataSettings,
    split: Split,
    label: str = "",
    given: Rows | None = None,
) -> tuple[Sequence[Example], list[str]]:
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
