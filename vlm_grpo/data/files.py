"""Rows of JSON, JSON Lines and text tables, and of folders of images."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_grpo.config.data import Split
from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError
from vlm_grpo.task.parsing import refuse_constant, refuse_repeated_keys

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "eval": ("val", "valid", "validation", "dev", "test"),
}
"""Names of each part in published datasets, the preferred one first."""
MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 32
"""Deepest nesting of lists and objects; a row whose answer is a list of boxes has four."""
CAPTION_QUESTION = "Describe the image in one sentence."
"""Question of rows whose source has captions and no questions."""
CLASS_QUESTION = "What is in the image?"
_FILE_COLUMNS = ("file_name", "file_names")
"""Columns of the images in a metadata file of ``datasets``."""


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield a row for each line that is not blank; a malformed line yields a row with a problem."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    with file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            location = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                problem = f"the line is longer than {MAX_LINE_BYTES} bytes"
                yield Row(location, number, problem=problem)
            elif line.strip():
                try:
                    yield Row(location, number, parse_object(line), strict=True)
                except ValueError as error:
                    yield Row(location, number, problem=str(error))


def read_rows(path: Path, values: Sequence[Any]) -> Iterator[Row]:
    """Yield a row for each item of a JSON file's array."""
    for number, value in enumerate(values, start=1):
        location = f"{path} row {number}"
        if isinstance(value, dict):
            yield Row(location, number, value, strict=True)
        else:
            problem = f"it must be a JSON object, not a {type(value).__name__}"
            yield Row(location, number, problem=problem)


def read_json(path: Path) -> Any:
    try:
        return _parse_json(path.read_bytes(), "it")
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"file {path}: {error}; a file with one object per line needs the suffix .jsonl"
        ) from error


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse one line as a JSON object; ``ValueError``: it is none, or is nested too deeply."""
    value = _parse_json(line.rstrip(), "the line")
    if not isinstance(value, dict):
        raise ValueError(f"the line must be a JSON object, not a {type(value).__name__}")
    return value


def _parse_json(data: bytes, what: str) -> Any:
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(
            text, parse_constant=refuse_constant, object_pairs_hook=refuse_repeated_keys
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " * (error.lineno > 1) + f"column {error.colno}"
        raise ValueError(f"{what} is not JSON: {error.msg} at {place}") from error
    except ValueError as error:  # a refused constant or key, or a number with thousands of digits
        raise ValueError(f"{what} is not JSON: {error}") from error
    level = [value]
    for _ in range(MAX_DEPTH + 1):  # without recursion
        lists = [item for item in level if isinstance(item, list)]
        level = [item for inner in lists for item in inner] + [
            item for inner in level if isinstance(inner, dict) for item in inner.values()
        ]
        if not level:
            return value
    raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}")


def read_csv(path: Path) -> Iterator[Row]:
    """Yield a row for each record after the header; empty cells are missing values.

    The cells of a file with the suffix .tsv are separated by tabs. (The reader of ``datasets``
    would guess types, so that the answer 007 became 7, and names no line.)
    """
    is_tsv = path.suffix.lower() == ".tsv"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True, delimiter="\t" if is_tsv else ",")
            names: Sequence[str] = reader.fieldnames or ()
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"its header has {twice[0]} twice")
            if len(names) == 1 and any(mark in names[0] for mark in ",;\t|"):
                raise ValueError(
                    f"its header has the one column {names[0]}: cells are separated by "
                    + ("tabs" if is_tsv else "commas")
                )
            for number, values in enumerate(reader, start=1):
                location = f"{path}:{reader.line_num}"
                if None in values or None in values.values():
                    problem = f"it does not have {len(names)} cells as the header"
                    yield Row(location, number, problem=problem)
                else:
                    yield Row(location, number, {k: v or None for k, v in values.items()})
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"file {path} cannot be read: {error}") from error


def find_metadata(folder: Path) -> Path | None:
    paths = (folder / f"metadata{suffix}" for suffix in (".jsonl", ".csv"))
    return next((path for path in paths if path.is_file()), None)


def read_metadata(folder: Path) -> Iterator[Row]:
    """Yield the rows of a folder's metadata file; ``file_name`` is the column of the images."""
    path = find_metadata(folder) or folder
    rows: Iterable[Row] = (read_jsonl if path.suffix == ".jsonl" else read_csv)(path)
    for row in rows:
        values = row.values
        found = [column for column in _FILE_COLUMNS if column in values]
        if row.problem is None and len(found) > 1:
            yield replace(row, problem=f"it has {' and '.join(found)}: keep one of them")
        elif row.problem is None and not found and not {"image", "images"} & values.keys():
            yield replace(row, problem="it has no file_name, the path of its image")
        else:
            named = {"images" if k in _FILE_COLUMNS else k: v for k, v in values.items()}
            yield replace(row, values=named)
