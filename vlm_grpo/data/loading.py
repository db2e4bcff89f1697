"""A source's name to its checked examples."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from vlm_grpo.config.run import DataSettings
from vlm_grpo.data.images import ImageReader
from vlm_grpo.data.jsonl import read_jsonl
from vlm_grpo.data.rows import Row, first_valid, to_example
from vlm_grpo.errors import UserError, bullets, nearest
from vlm_grpo.task import Task
from vlm_grpo.types import Example

logger = logging.getLogger(__name__)

Split = Literal["train", "eval"]

_EMBEDDED = {
    "counting": "vlm_grpo.data_scripts.make_shapes",
    "cluttered": "vlm_grpo.data_scripts.make_shapes",
    "grounding": "vlm_grpo.data_scripts.make_shapes",
    "crowded": "vlm_grpo.data_scripts.make_shapes",
    "ocr": "vlm_grpo.data_scripts.make_words",
}
_EMBEDDED_SEED = 1
"""Not the seed of the examples that the embedded model was made with."""
_EMBEDDED_SIZES: dict[Split, int] = {"train": 4096, "eval": 500}

_SHOWN = 50
"""Bad rows that one message lists; the rest are counted."""


def load_examples(
    source: str, task: Task, data: DataSettings | None = None, split: Split = "eval"
) -> list[Example]:
    """All examples of a source, each one checked; the images' headers are read, not their pixels.

    Args:
        source: path to a ``.jsonl`` or ``.parquet`` file, ``hf:NAME[:SPLIT[:CONFIG]]``, or
            ``embedded:NAME``.
        task: says which answers have the right form.
        data: image root, limits and what to do with bad rows; None: the defaults.
        split: which limit holds, and which part of a source that has parts is read.

    Raises:
        UserError: the source cannot be read, holds no example, or holds bad rows (all are named)
            that are not to be skipped.
    """
    data = DataSettings(train=source) if data is None else data
    limit = data.train_limit if split == "train" else data.eval_limit
    if source.startswith("embedded:"):
        return _embedded(source.removeprefix("embedded:"), limit, split, task)
    if split == "eval" and source == data.train and data.eval is not None:
        logger.warning("data.eval is data.train: the evaluation is not on held-out examples")
    rows, folder = open_source(source, split)
    root = data.image_root
    if split == "eval" and data.eval_image_root is not None:
        root = data.eval_image_root
    images = ImageReader(root or folder, data.max_image_pixels)
    examples, problems = collect_examples(rows, data, images, task, limit)
    if problems and (data.on_bad_row == "error" or not examples):
        raise UserError(
            f"{source} holds {_bad_rows(len(problems))} (good ones: {len(examples)}):\n"
            f"{bullets(problems, _SHOWN)}\n"
            "mend them; training can leave them out by data.on_bad_row=skip"
        )
    if problems:
        logger.warning(
            "%s: left out %s, kept %d:\n%s",
            source, _bad_rows(len(problems)), len(examples), bullets(problems, 5),
        )  # fmt: skip
    if not examples:
        raise UserError(f"{source} holds no examples")
    return examples


def collect_examples(
    rows: Iterable[Row], data: DataSettings, images: ImageReader, task: Task, limit: int | None
) -> tuple[list[Example], list[str]]:
    """The good rows as examples, and what is wrong with each of the others."""
    examples: list[Example] = []
    problems: list[str] = []
    places: dict[str, str] = {}
    for row in rows:
        if limit is not None and len(examples) >= limit:
            break
        try:
            example = to_example(row, data.columns, images, task)
        except ValueError as error:
            problems.append(f"{row.where}: {error}")
            continue
        first = places.setdefault(example.id, row.where)
        if first != row.where:
            problems.append(f"{row.where}: id {example.id!r} is a duplicate of {first}")
            continue
        examples.append(example)
    return examples, problems


def open_source(source: str, split: Split) -> tuple[Iterable[Row], Path | None]:
    """The source's rows, and the folder that its image paths are relative to."""
    if source.startswith("hf:"):
        # Loaded here because these libraries take seconds, which no other source should cost.
        hub = importlib.import_module("vlm_grpo.data.hub")
        return hub.read_hub(source.removeprefix("hf:"), split)
    path = Path(source).expanduser()
    readers = {".jsonl": read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(path.suffix)
    if reader is None:
        raise UserError(
            f"{source} is no data source: give a .jsonl or .parquet file, "
            "hf:NAME[:SPLIT[:CONFIG]], or embedded:counting"
        )
    if not path.is_file():
        raise UserError(f"there is no data file {path}")
    return reader(path), path.parent


def _read_parquet(path: Path) -> Iterable[Row]:
    return importlib.import_module("vlm_grpo.data.parquet").read_parquet(path)


def _embedded(name: str, limit: int | None, split: Split, task: Task) -> list[Example]:
    """Examples that are drawn on the spot; the two splits are independent draws."""
    if name not in _EMBEDDED:
        raise UserError(
            f"there is no embedded data {name!r}{nearest(name, _EMBEDDED)}: "
            f"give one of {', '.join(f'embedded:{known}' for known in _EMBEDDED)}"
        )
    maker = importlib.import_module(_EMBEDDED[name])
    examples = maker.examples(name, limit or _EMBEDDED_SIZES[split], _EMBEDDED_SEED, split)
    try:
        first_valid(examples[:1], task)
    except ValueError as error:
        raise UserError(f"embedded:{name} is no data for {type(task).__name__}: {error}") from error
    return examples


def _bad_rows(count: int) -> str:
    return "1 bad row" if count == 1 else f"{count} bad rows"
