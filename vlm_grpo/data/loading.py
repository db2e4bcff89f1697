"""Loading of data as checked examples: of one source, and what a run trains and evaluates on."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from vlm_grpo.config.data import PYTHON, DataSettings, SourceSettings, Split
from vlm_grpo.config.run import Settings
from vlm_grpo.data.boxes import TRIED_ROWS, BoxExtent, suggest_settings
from vlm_grpo.data.filter import filter_examples
from vlm_grpo.data.formats import open_source
from vlm_grpo.data.held_out import (
    get_held_out_task,
    split_by_image,
    stands_for_both,
    warn_about_shared_images,
)
from vlm_grpo.data.images import MediaReader
from vlm_grpo.data.mixed_task import Mixed, load_run_task
from vlm_grpo.data.objects import NO_OBJECTS, Objects, Rows, check_rows
from vlm_grpo.data.rows import Row, to_example
from vlm_grpo.errors import UserError, list_bad_rows
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import BoxError
from vlm_grpo.task.registry import check_trainable
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example, Examples, VideoRef

logger = logging.getLogger(__name__)

_MAX_LISTED = 50  # Bad rows listed in one message; the rest are only counted


def load_examples(
    source: str | Path | Rows, task: Task, data: DataSettings | None = None, split: Split = "eval"
) -> Examples:
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
) -> Examples:
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
            f"{list_bad_rows(problems, _MAX_LISTED)}\n{remedy if examples else 'fix them'}"
        )
    if problems:
        listed = list_bad_rows(problems, 5)
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
) -> tuple[list[Example], list[str]]:
    """Return the good rows of a source as examples, and one problem for each bad row.

    A problem with a box names the settings that read all boxes of the first rows, if there are any.
    """
    limit, columns = source.limit, dict(source.columns)
    rows, folders = open_source(source.source if given is None else given, task, limit, split)
    if source.image_root is not None:
        folders = [source.image_root, *folders]
    reader = MediaReader(folders, data.max_image_pixels, data.video)
    task_column = columns.pop("task", None)
    own = source.model_copy(update={"columns": columns})
    read = partial(to_example, images=reader)
    examples: list[Example] = []
    problems: list[str] = []
    first_with_id: dict[str, int] = {}
    seen: dict[Any, Any] = {}
    tried: list[tuple[Row, Task]] = []
    extent, bad_box = BoxExtent(), None  # the first row with a bad box of the source's own form
    for row in rows:
        if limit is not None and len(examples) >= limit:
            break
        try:
            name, row_task = "", task
            if source.default_question is not None:
                row = replace(row, question=source.default_question)
            if task_column is not None:
                name, row_task, row = _pop_task(row, task_column, task)
            if len(tried) < TRIED_ROWS:
                tried.append((row, row_task))
            example = read(row, own, task=row_task)
            first = first_with_id.setdefault(example.id, len(examples))
            if first < len(examples):
                where = examples[first].location or f"example {first + 1}"
                raise ValueError(f"id {example.id!r} is a duplicate of {where}")
            if (earlier := row_task.find_repeat(example, seen)) is not None:
                raise ValueError(f"it repeats example {earlier}")
        except ValueError as error:
            has_own_form = row.problem is None and row.example is None and not row.in_pixels
            if bad_box is None and has_own_form and isinstance(error, BoxError):
                bad_box = len(problems)
            problems.append(f"{row.location}: {error}")
            continue
        extent.add(example, row_task)
        if label:
            name = f"{label}/{name}" if name else label
            example = replace(example, id=f"{label}/{example.id}", source=name)
        examples.append(example)
    if bad_box is not None:
        problems[bad_box] += suggest_settings(tried, own, read, is_mixed=bool(label))
    if extent.is_short:
        logger.warning("%s: %s", source.source, extent)
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


def load_split(
    settings: Settings, task: Task, split: Split, objects: Objects = NO_OBJECTS
) -> Examples:
    """Load the training or the held-out examples of a run from all of their sources.

    A mixture as ``task`` gives the examples the names of their sources. Errors are those of
    ``load_examples``.
    """
    found: list[Example] = []
    for source in settings.data.get_sources(split):
        own, label = task, source.label if isinstance(task, Mixed) else ""
        if isinstance(task, Mixed) and source.tasks:
            own = Mixed(members={name: task.members[f"{label}/{name}"] for name in source.tasks})
        elif isinstance(task, Mixed):
            own = task.members[label]
        rows = objects.train if split == "train" else objects.eval
        found += load_source(source, own, settings.data, split, label, rows)
    return found


def load_run(settings: Settings, objects: Objects = NO_OBJECTS) -> tuple[Task, Examples, Examples]:
    """Load what a run needs besides its model: its task, and its training and held-out examples."""
    task = load_run_task(settings, objects)
    for member in task.members.values() if isinstance(task, Mixed) else [task]:
        check_trainable(member)
    return task, *load_data(settings, task, objects)


def load_data(
    settings: Settings, task: Task, objects: Objects = NO_OBJECTS
) -> tuple[Examples, Examples]:
    """Load the training and the held-out examples of a run.

    Log a warning if both are the same data or share images, and if ``data.video`` is given but no
    example has a video.
    """
    data, train = settings.data, load_split(settings, task, "train", objects)
    held_out: Examples = []
    if data.eval_share is not None:
        train, held_out = split_by_image(train, data.eval_share, settings.seed)
    train, line = filter_examples(train, data)  # the held-out examples stay the same
    if line is not None and os.environ.get("RANK", "0") == "0":
        logger.info(line)
    if data.eval is not None:
        held_out = load_split(settings, get_held_out_task(settings, task), "eval", objects)
        sources, others = ({s.source for s in data.get_sources(n)} for n in ("train", "eval"))
        if not all(map(stands_for_both, sources & others)):
            logger.warning("data.eval is data.train: the evaluation is not on held-out examples")
        warn_about_shared_images(train, held_out)
    media = chain.from_iterable(example.images for example in chain(train, held_out))
    if data.video is not None and not any(isinstance(image, VideoRef) for image in media):
        logger.warning("data.video has no effect: no example has a video")
    return train, held_out


def build_scorer(settings: Settings, rank: int) -> RewardScorer:
    """Build the scorer of one rank of a run; its cache is in the run's folder."""
    rollout = settings.rollout
    cache = settings.run_dir / "reward_cache" / f"rank-{rank}.jsonl"
    return RewardScorer(rollout.reward_timeout, rollout.reward_workers, cache)
