"""The formats of data sources: how each is recognized, and the reader of its rows.

A format is one entry of ``find_formats``; most of those of annotations are files of
``data_scripts``. Training and ``check`` read every source through ``open_source``.
"""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from vlm_grpo.config.data import PYTHON, Split
from vlm_grpo.data.detection import (
    find_coco_file,
    list_image_folders,
    list_images,
    read_json_source,
)
from vlm_grpo.data.files import SPLIT_NAMES, find_metadata, read_csv, read_jsonl, read_metadata
from vlm_grpo.data.objects import Rows
from vlm_grpo.data.rows import Row, select_valid
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.task import Task
from vlm_grpo.types import Example

_MODULES = (
    *("charts", "clips", "distances", "figures", "mazes", "pictures"),
    *("screens", "shapes", "tables", "tiny_words", "words"),
)
_ANNOTATIONS = ("yolo", "voc")
"""Formats of annotations: each file ``format_NAME.py`` defines two, ``FILE`` and ``FOLDER``."""
_EMBEDDED_SEED = 1  # Differs from the seed of the examples on which the embedded model was trained
_EMBEDDED_SIZES: dict[Split, int] = {"train": 4096, "eval": 500}
_ARGUMENTS: dict[Split, str] = {"train": "data", "eval": "held_out"}
"""Arguments of ``train`` by split."""
_MAX_EMBEDDED = 1_000_000
"""Maximum number of examples of an embedded dataset, which are drawn and held in memory."""
_SHARDS = (".tar", ".parquet", ".arrow", ".jsonl", ".csv", ".tsv")
"""Files of which a folder may hold several that are read one after the other."""


@dataclass(frozen=True)
class Format:
    form: str  # description for messages
    fits: Callable[[Path], bool]  # return whether a path has the format
    # yield the rows of a path for a task and a split
    read: Callable[[Path, Task, Split], Iterable[Row]]
    # return the folders that the paths of its images may be relative to
    list_folders: Callable[[Path], Sequence[Path]] = lambda path: [path.parent]


def has_suffix(*suffixes: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix.lower() in suffixes and not path.is_dir()


def is_folder(test: Callable[[Path], Any]) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and bool(test(path))


def _read_table(path: Path, task: Task, split: Split) -> Iterable[Row]:
    from vlm_grpo.data.hub import read_hub, read_parquet, read_tar  # slow to import

    if path.is_dir():
        return read_hub(str(path), split)
    return read_tar(path) if path.suffix.lower() == ".tar" else read_parquet(path)


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _list_shards(folder: Path) -> list[Path]:
    found = (sorted(folder.glob(f"*{suffix}")) for suffix in _SHARDS)
    return next((shards for shards in found if shards), [])


def _read_shards(folder: Path, task: Task, split: Split) -> Iterable[Row]:
    return _read_all(_list_shards(folder), task, split)


def _read_images(folder: Path, task: Task, split: Split) -> Iterator[Row]:
    """Yield a row for each image, for tasks that ask about images alone."""
    for number, path in enumerate(list_images(folder), start=1):
        name = path.relative_to(folder).as_posix()
        yield Row(str(path), number, {"id": name, "images": [name]})


def _itself(path: Path) -> Sequence[Path]:
    return [path]


def _only_path(read: Callable[[Path], Iterable[Row]]) -> Callable[..., Iterable[Row]]:
    return lambda path, *_: read(path)


@cache
def find_formats() -> tuple[Format, ...]:
    """Return all formats; the first that fits a path reads it."""
    own = [import_module(f"vlm_grpo.data_scripts.format_{name}") for name in _ANNOTATIONS]
    return (
        Format(".jsonl", has_suffix(".jsonl"), _only_path(read_jsonl)),
        Format(
            ".json (an array, or COCO)", has_suffix(".json"), read_json_source, list_image_folders
        ),
        Format(".csv or .tsv", has_suffix(".csv", ".tsv"), _only_path(read_csv)),
        Format(".parquet", has_suffix(".parquet"), _read_table),
        Format(".tar (WebDataset)", has_suffix(".tar"), _read_table),
        *(module.FILE for module in own),
        Format("a folder of save_to_disk", is_folder(_is_saved), _read_table, _itself),
        Format("a folder of COCO", is_folder(find_coco_file), read_json_source, list_image_folders),
        *(module.FOLDER for module in own),
        Format(
            "of images and metadata", is_folder(find_metadata), _only_path(read_metadata), _itself
        ),
        Format("of shards", is_folder(_list_shards), _read_shards, _itself),
        Format("of images alone", is_folder(list_images), _read_images, _itself),
    )


def open_source(
    source: str | Rows, task: Task, limit: int | None, split: Split
) -> tuple[Iterable[Row], Sequence[Path]]:
    """Open a source: a path, a glob of paths, ``hf:NAME[:SPLIT[:CONFIG]]``,
    ``embedded:NAME[:DIALS]``, or rows in memory.

    Return its rows, and the folders that the paths of its images may be relative to.
    ``task`` asks about the objects of detection datasets, ``limit`` is the number of examples of
    embedded data, and ``split`` selects the part of a source that has several.
    """
    if not isinstance(source, str):
        rows = cast("Any", source)
        if hasattr(rows, "cast_column"):  # a Dataset, whose library is slow to import
            from vlm_grpo.data.hub import read_dataset

            return read_dataset(rows, f"data.{split}"), [Path()]
        return _read_memory(source, split), [Path()]
    if source.startswith("embedded:"):
        return _read_embedded(source, task, limit, split), []
    if source == PYTHON:
        raise UserError(
            f"data.{split}={source}: these rows are an argument of the Python program that wrote "
            f"the settings: give them, as train(settings, {_ARGUMENTS[split]}=rows), or save them "
            "in a .jsonl file and give its path"
        )
    if source.startswith("hf:"):
        # Imported here because the library takes seconds to load and only this source needs it.
        from vlm_grpo.data.hub import read_hub

        name = source.removeprefix("hf:")
        folder = Path(name.partition(":")[0])
        return read_hub(name, split), [folder] if folder.is_dir() else []
    paths = [_enter_split(path, split) for path in _expand(source)]
    folders = chain.from_iterable(_find_format(path).list_folders(path) for path in paths)
    return _read_all(paths, task, split), list(dict.fromkeys(folders))


def _enter_split(path: Path, split: Split) -> Path:
    if not (path / "train").is_dir():
        return path
    found = (path / name for name in SPLIT_NAMES[split])
    return next((folder for folder in found if folder.is_dir()), path)


def _expand(source: str) -> list[Path]:
    text = os.path.expanduser(source)  # Path's own raises for an unknown user
    if os.path.exists(text):
        return [Path(text)]
    found = sorted(glob.glob(text))
    if not found and (not (path := Path(text)).suffix or any(f.fits(path) for f in find_formats())):
        raise UserError(f"there is no data file {path}")
    return [Path(name) for name in found or [text]]


def _find_format(path: Path) -> Format:
    for candidate in find_formats():
        if candidate.fits(path):
            return candidate
    forms = ", ".join(known.form for known in find_formats())
    raise UserError(
        f"{path} is not a data source: give {forms}, a glob of such "
        "files, hf:NAME[:SPLIT[:CONFIG]] (hf:./FOLDER for a subfolder of images per class), or "
        "embedded:counting"
    )


def _read_all(paths: Sequence[Path], task: Task, split: Split) -> Iterable[Row]:
    """Return the rows of files one after the other, numbered on."""
    if len(paths) == 1:
        return _find_format(paths[0]).read(paths[0], task, split)
    rows = chain.from_iterable(_find_format(path).read(path, task, split) for path in paths)
    return (replace(row, number=number) for number, row in enumerate(rows, start=1))


def _read_memory(rows: Any, split: Split) -> Iterator[Row]:
    for number, values in enumerate(rows, start=1):
        location = f"data.{split} row {number}"
        if isinstance(values, Example):
            yield Row(location, number, example=values)
        elif isinstance(values, Mapping):
            scalars = {k: v.item() for k, v in values.items() if isinstance(v, np.generic)}
            yield Row(location, number, {**values, **scalars})
        else:
            yield Row(location, number, problem=f"it is not a mapping but {type(values).__name__}")


def _read_embedded(source: str, task: Task, limit: int | None, split: Split) -> Iterator[Row]:
    """Generate the examples of an embedded dataset; the two splits share no random stream."""
    task_name = source.removeprefix("embedded:")
    kind, _, _ = task_name.partition(":")
    modules = [import_module(f"vlm_grpo.data_scripts.make_{name}") for name in _MODULES]
    generators = {k: module.draw_examples for module in modules for k in module.draw_examples.kinds}
    if kind not in generators:
        raise UserError(
            f"there is no embedded dataset {kind!r}{nearest(kind, generators)}: "
            f"give one of {', '.join(f'embedded:{known}' for known in generators)}"
        )
    if limit is not None and limit > _MAX_EMBEDDED:
        raise UserError(f"{source} has at most {_MAX_EMBEDDED:,} examples, not {limit:,}")
    count = limit or _EMBEDDED_SIZES[split]
    examples = generators[kind](task_name, count, _EMBEDDED_SEED, split)
    try:
        select_valid(examples[:1], task)
    except ValueError as error:
        raise UserError(f"{source} does not fit {type(task).__name__}: {error}") from error
    for number, example in enumerate(examples, start=1):
        yield Row(f"{source} row {number}", number, example=example)
