"""Readers of published formats: JSON, JSON Lines, pickles, tables and COCO annotations.

A file that is missing, truncated or malformed raises ``UserError`` with the file's name.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from vlm_grpo.data.jsonl import read_jsonl
from vlm_grpo.data_scripts.rows import Image, RawRecord, RefusedRow
from vlm_grpo.errors import UserError


def expand_path(source: str) -> Path:
    """Return a source as a path, with ``~`` replaced by the home folder."""
    try:
        return Path(os.path.expanduser(source))
    except RuntimeError as error:
        raise UserError(f"{source}: {error}") from error


@dataclass(frozen=True)
class Request:
    """The source that a converter reads.

    Attributes:
        source: a path, or the name of a table as ``read_table`` accepts it.
        images: the folder that the rows' image paths are relative to.
        split: one of the converter's splits.
        task: name of the task that the rows are converted for.
    """

    source: str
    images: Path
    split: str
    task: str

    @property
    def path(self) -> Path:
        """The source as a path."""
        return expand_path(self.source)


def find_file(source: str, *patterns: str) -> Path:
    """Return the source if it is a file, else the only match of the first pattern that matches.

    Args:
        source: a file, or a folder to search.
        patterns: globs relative to the folder, in order of preference.

    Raises:
        UserError: no file matches, or a pattern matches several.
    """
    path = expand_path(source)
    if path.is_file():
        return path
    for pattern in patterns:
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            names = ", ".join(str(name) for name in found[:5])
            raise UserError(f"{source} holds several {pattern} ({names}): pass one as --source")
        if found:
            return found[0]
    raise UserError(f"{source} is not a file and holds no {' or '.join(patterns)}")


def read_text(path: Path, encoding: str = "utf-8-sig") -> str:
    """Return the text of a file, without a byte order mark."""
    try:
        return path.read_text(encoding=encoding)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is corrupt: it is not {encoding} text ({error.reason})") from error


def list_split_files(source: str, split: str, pattern: str) -> list[Path]:
    """Return the files of a split, in the folder of its name if the source has one.

    Raises:
        UserError: there are none.
    """
    folder = expand_path(source)
    files = sorted((folder / split if (folder / split).is_dir() else folder).glob(pattern))
    if not files:
        raise UserError(f"{source} holds no {pattern} of split {split}")
    return files


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return parse_json(read_text(path), path)


def parse_json(text: str, path: Path) -> Any:
    """Return the value in a file's text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is corrupt or truncated: {error}") from error


def read_json_rows(path: Path) -> Iterator[RawRecord]:
    """Yield the objects of a JSON Lines file, or of a JSON file that holds one list of objects."""
    with path.open("rb") as file:
        is_list = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if is_list:
        yield from read_json(path)
        return
    for row in read_jsonl(path):
        if row.problem is not None:
            raise UserError(f"{path} is corrupt or truncated: {row.location}: {row.problem}")
        yield dict(row.values)


def read_data(path: Path) -> list[RawRecord]:
    """Return the objects under ``data`` in a JSON file."""
    return read_json(path)["data"]


def read_rows(
    request: Request,
    columns: Sequence[str],
    locate: Callable[[RawRecord], str | None],
    read_file: Callable[[Path], Iterable[RawRecord]] = read_json_rows,
) -> Iterator[tuple[RawRecord, Image]]:
    """Yield the rows of a JSON file or of a table, each with its image.

    Args:
        request: its source is the file or the table.
        columns: columns that a table must have, in addition to ``image``.
        locate: returns the path of the image of a file's row.
        read_file: reads the file.
    """
    if request.source.endswith((".json", ".jsonl")):
        for row in read_file(request.path):
            yield row, locate(row)
    else:
        split = {"val": "validation"}.get(request.split, request.split)
        for row in read_table(request.source, split, ("image", *columns)):
            yield row, get_image_bytes(row["image"])


class _DataUnpickler(pickle.Unpickler):
    """An unpickler of dicts, lists, strings and numbers that refuses any reference to code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}; only plain data is allowed")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to data outside the file")


def read_pickle(path: Path) -> Any:
    """Return the value of a pickle of plain containers, without running any code in it."""
    try:
        with path.open("rb") as file:
            # Python 2 wrote the published files; UTF-8 reads its byte strings as text.
            return _DataUnpickler(file, encoding="utf-8").load()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(
            f"{path} is corrupt, truncated or not a pickle of plain data: {error}"
        ) from error


def read_table(source: str, split: str, columns: Sequence[str]) -> Iterator[RawRecord]:
    """Yield the rows of a table with an image column, images as encoded bytes.

    Args:
        source: ``hf:NAME[:SPLIT[:CONFIG]]``, a folder saved by ``datasets``, a ``.parquet`` file,
            or a folder with parquet files whose names begin with the split.
        split: the split to read if ``source`` does not name one.
        columns: columns that the rows must have.
    """
    for row in _table_rows(source, split):
        missing = [column for column in columns if column not in row.values]
        if missing:
            raise UserError(
                f"{row.location} has no column {', '.join(missing)}; it has {', '.join(row.values)}"
            )
        yield dict(row.values)


def _table_rows(source: str, split: str) -> Iterator[Any]:
    path = expand_path(source)
    parts = [path] if path.is_file() else sorted(path.glob(f"**/{split}[-._]*parquet"))
    if parts:
        if path.is_dir():
            _check_all_parts(parts)
        from vlm_grpo.data.hub import read_parquet  # slow to import

        for part in parts:
            yield from read_parquet(part)
        return
    name, _, rest = source.removeprefix("hf:").partition(":")
    from vlm_grpo.data.hub import read_hub  # slow to import

    yield from read_hub(f"{name}:{rest or split}", "eval")


def _check_all_parts(parts: Sequence[Path]) -> None:
    """Raise ``UserError`` if a part of a table is missing, by names like ``a-00001-of-00003``."""
    found: dict[tuple[Path, str, int], int] = {}
    for part in parts:
        if name := re.fullmatch(r"(.*)-\d+-of-(\d+)\.parquet", part.name):
            table = (part.parent, name[1], int(name[2]))
            found[table] = found.get(table, 0) + 1
    for (folder, name, total), count in found.items():
        if count < total:
            raise UserError(f"{folder} has {count} of the {total} parts of {name}: add the others")


def get_image_bytes(value: Any) -> bytes | None:
    """Return the encoded image in a table's image column, or None if the cell is empty."""
    value = value.get("bytes") if isinstance(value, Mapping) else value
    return value if isinstance(value, bytes) else None


@dataclass(frozen=True)
class CocoAnnotations:
    """The content of a COCO annotation file; images and categories are indexed by id.

    Attributes:
        images: image entries, with ``file_name``.
        annotations: annotation entries, with ``bbox`` as xywh in pixels; their ids may repeat.
        categories: category names.
    """

    images: Mapping[int, RawRecord]
    annotations: Sequence[RawRecord]
    categories: Mapping[int, str]

    def group_by_image(self) -> dict[int, list[RawRecord]]:
        """Return the annotations of every image, an empty list for an image without any."""
        groups: dict[int, list[RawRecord]] = {image: [] for image in self.images}
        for annotation in self.annotations:
            groups[annotation["image_id"]].append(annotation)
        return groups

    def to_answer(self, regions: Sequence[RawRecord]) -> dict[str, list]:
        """Return the boxes and labels of some annotations."""
        return {
            "boxes": [xywh_to_xyxy(region["bbox"]) for region in regions],
            "labels": [self.categories[region["category_id"]] for region in regions],
        }


def read_coco(path: Path) -> CocoAnnotations:
    """Read a COCO annotation file."""
    content = read_json(path)
    missing = [n for n in ("images", "annotations", "categories") if n not in content]
    if missing:
        raise UserError(f"{path} is not a COCO annotation file: it has no {', '.join(missing)}")
    return CocoAnnotations(
        images=index_by_id(content["images"], path),
        annotations=content["annotations"],
        categories={category["id"]: category["name"] for category in content["categories"]},
    )


def index_by_id(entries: Sequence[RawRecord], path: Path) -> dict[int, RawRecord]:
    """Return a file's entries by id.

    Raises:
        UserError: entries share an id, so that all but one would be lost.
    """
    indexed = {entry["id"]: entry for entry in entries}
    if len(indexed) < len(entries):
        raise UserError(
            f"{path} is corrupt: {len(entries):,} entries have only {len(indexed):,} different ids"
        )
    return indexed


def refuse_incomplete(name: str, found: int, expected: int) -> Iterator[RefusedRow]:
    """Yield a refused row if a list or folder of images does not have the published number."""
    if found != expected:
        reason = "not the published number of images"
        yield RefusedRow(name, reason, f"{found:,} instead of {expected:,}", kind="source")


def xywh_to_xyxy(box: Sequence[float]) -> list[float]:
    """Convert a box from COCO's x, y, width, height to x1, y1, x2, y2.

    >>> xywh_to_xyxy([10, 20, 5.5, 4])
    [10, 20, 15.5, 24]
    """
    x, y, width, height = box
    return [x, y, x + width, y + height]


def enclosing_box(boxes: Sequence[Sequence[float]]) -> list[float]:
    """Return the smallest xyxy box that contains all boxes.

    >>> enclosing_box([[0, 5, 2, 6], [1, 1, 3, 2]])
    [0, 1, 3, 6]
    """
    left, top, right, bottom = zip(*boxes, strict=True)
    return [min(left), min(top), max(right), max(bottom)]
