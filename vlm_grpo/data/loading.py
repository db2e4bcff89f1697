"""Loading a dataset by name as a list of checked ``Example``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlm_grpo.config.run import DataSettings
from vlm_grpo.config.sources import IN_MEMORY, InMemoryRows, Rows, to_source
from vlm_grpo.data.images import ImageReader
from vlm_grpo.data.jsonl import read_jsonl
from vlm_grpo.data.rows import Row, select_valid, to_example
from vlm_grpo.data.text_tables import read_csv, read_json_array
from vlm_grpo.errors import UserError, bullets, nearest
from vlm_grpo.task import Task
from vlm_grpo.types import Example

logger = logging.getLogger(__name__)

Split = Literal["train", "eval"]

_EMBEDDED = ("counting", "cluttered", "grounding", "crowded", "ocr")
_EMBEDDED_SEED = 1
"""Differs from the seed of the examples on which the embedded model was trained."""
_EMBEDDED_SIZES: dict[Split, int] = {"train": 4096, "eval": 500}

_MAX_EMBEDDED = 1_000_000
"""Maximum number of examples of an embedded dataset, which are drawn and held in memory."""

_MAX_LISTED = 50
"""Bad rows listed in one message; the rest are only counted."""


def load_examples(
    source: str | Path | Rows, task: Task, data: DataSettings | None = None, split: Split = "eval"
) -> list[Example]:
    """Load all examples of a source and check each of them.

    Only the headers of the images are read, not their pixels.

    Args:
        source: path to a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file,
            ``hf:NAME[:SPLIT[:CONFIG]]``, ``embedded:NAME``, or rows in memory (mappings, a
            ``datasets.Dataset`` or ``Example``s).
        task: the task that checks the form of each answer and writes each prompt.
        data: image root, limits and the treatment of bad rows; None: the defaults.
        split: selects the limit, and the split of a source that has several.

    Raises:
        UserError: the source cannot be read, has no examples, or has bad rows (all are named)
            while ``data.on_bad_row`` is "error".
    """
    source = _to_source(source)
    data = DataSettings(train=source) if data is None else data
    examples, problems = read_examples(source, task, data, split)
    if problems and (data.on_bad_row == "error" or not examples):
        remedy = "fix them; training can skip them with data.on_bad_row=skip"
        raise UserError(
            f"{source} has {_count_bad_rows(problems)} (good rows: {len(examples)}):\n"
            f"{bullets(problems, _MAX_LISTED)}\n{remedy if examples else 'fix them'}"
        )
    if problems:
        logger.warning(
            "%s: skipped %s, kept %d:\n%s",
            source, _count_bad_rows(problems), len(examples), bullets(problems, 5),
        )  # fmt: skip
    if not examples:
        raise UserError(f"{source} has no examples")
    return examples


def read_examples(
    source: str | Path | Rows, task: Task, data: DataSettings, split: Split = "eval"
) -> tuple[list[Example], list[str]]:
    """Read a source; return its good rows as examples, and one problem for each bad row.

    Arguments and errors are those of ``load_examples``, but bad rows and an empty source are not
    an error.
    """
    source = _to_source(source)
    limit = data.train_limit if split == "train" else data.eval_limit
    rows, folder = _open_source(source, task, limit, split)
    root = data.image_root
    if split == "eval" and data.eval_image_root is not None:
        root = data.eval_image_root
    images = ImageReader(root or folder, data.max_image_pixels)
    examples: list[Example] = []
    problems: list[str] = []
    first_with_id: dict[str, str] = {}
    for row in rows:
        if limit is not None and len(examples) >= limit:
            break
        try:
            example = to_example(row, data.columns, images, task)
        except ValueError as error:
            problems.append(f"{row.location}: {error}")
            continue
        first = first_with_id.setdefault(example.id, row.location)
        if first != row.location:
            problems.append(f"{row.location}: id {example.id!r} is a duplicate of {first}")
            continue
        examples.append(example)
    return examples, problems


def _to_source(source: Any) -> str | InMemoryRows:
    try:
        return to_source(source)
    except ValueError as error:
        raise UserError(f"the data source {error}, not {type(source).__name__}") from error


def _open_source(
    source: str | InMemoryRows, task: Task, limit: int | None, split: Split
) -> tuple[Iterable[Row], Path | None]:
    """Return the rows of a source and the folder that its image paths are relative to."""
    if isinstance(source, InMemoryRows):
        return _read_memory(source.rows, split), Path()
    if source.startswith("embedded:"):
        return _read_embedded(source, task, limit, split), None
    if source.startswith(IN_MEMORY):
        raise UserError(
            f"data.{split}={source}: these rows were in the memory of the Python program that "
            f'wrote the settings: give them again, as load_settings(…, data={{"{split}": rows}}), '
            "or save them in a .jsonl file and give its path"
        )
    if source.startswith("hf:"):
        # Imported here because the library takes seconds to load and only this source needs it.
        from vlm_grpo.data.hub import read_hub

        return read_hub(source.removeprefix("hf:"), split)
    path = Path(os.path.expanduser(source))  # Path's own raises for an unknown user
    readers = {
        ".jsonl": read_jsonl,
        ".json": read_json_array,
        ".csv": read_csv,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise UserError(
            f"{source} is not a data source: give a {', '.join(readers)} file, "
            "hf:NAME[:SPLIT[:CONFIG]], or embedded:counting"
        )
    if not path.is_file():
        raise UserError(f"there is no data file {path}")
    return reader(path), path.parent


def _read_memory(rows: Any, split: Split) -> Iterator[Row]:
    """Yield rows in memory: mappings, the rows of a ``datasets.Dataset``, or examples."""
    if hasattr(rows, "cast_column"):  # a Dataset, recognized without importing its library
        from vlm_grpo.data.hub import without_decoding

        rows = without_decoding(rows)
    for number, values in enumerate(rows, start=1):
        location = f"data.{split} row {number}"
        if isinstance(values, Example):
            yield Row(location, number, example=values)
        elif isinstance(values, Mapping):
            yield Row(location, number, {k: _to_python(v) for k, v in values.items()})
        else:
            yield Row(location, number, problem=f"it is not a mapping but {type(values).__name__}")


def _to_python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _read_parquet(path: Path) -> Iterable[Row]:
    from vlm_grpo.data.parquet import read_parquet  # slow to import

    return read_parquet(path)


def _read_embedded(source: str, task: Task, limit: int | None, split: Split) -> Iterator[Row]:
    """Generate the examples of an embedded dataset; the two splits share no random stream."""
    name = source.removeprefix("embedded:")
    if name not in _EMBEDDED:
        raise UserError(
            f"there is no embedded dataset {name!r}{nearest(name, _EMBEDDED)}: "
            f"give one of {', '.join(f'embedded:{known}' for known in _EMBEDDED)}"
        )
    if limit is not None and limit > _MAX_EMBEDDED:
        raise UserError(f"{source} has at most {_MAX_EMBEDDED:,} examples, not {limit:,}")
    from vlm_grpo.data_scripts import make_shapes, make_words

    generator = make_words if name == "ocr" else make_shapes
    examples = generator.draw_examples(name, limit or _EMBEDDED_SIZES[split], _EMBEDDED_SEED, split)
    try:
        select_valid(examples[:1], task)
    except ValueError as error:
        raise UserError(f"{source} does not fit {type(task).__name__}: {error}") from error
    for number, example in enumerate(examples, start=1):
        yield Row(f"{source} row {number}", number, example=example)


def _count_bad_rows(problems: Sequence[str]) -> str:
    return "1 bad row" if len(problems) == 1 else f"{len(problems)} bad rows"
