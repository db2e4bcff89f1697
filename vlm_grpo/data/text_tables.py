"""Reading a JSON array of objects, and CSV files with a header."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from vlm_grpo.data.jsonl import parse_json
from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError


def read_json_array(path: Path) -> Iterator[Row]:
    """Yield a row for each object of the file's JSON array.

    Raises:
        UserError: the file cannot be read or is not a JSON array.
    """
    try:
        values = parse_json(path.read_bytes(), "it")
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"file {path}: {error}; a file with one object per line needs the suffix .jsonl"
        ) from error
    if not isinstance(values, list):
        raise UserError(
            f"file {path} must be a JSON array of objects, not a {type(values).__name__}: convert "
            "it, for example with a converter of vlm_grpo.data_scripts"
        )
    for number, value in enumerate(values, start=1):
        location = f"{path} row {number}"
        if isinstance(value, dict):
            yield Row(location, number, value, strict=True)
        else:
            problem = f"it must be a JSON object, not a {type(value).__name__}"
            yield Row(location, number, problem=problem)


def read_csv(path: Path) -> Iterator[Row]:
    """Yield a row for each record after the header; empty cells are missing values.

    Raises:
        UserError: the file cannot be read or is not CSV in UTF-8.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for number, values in enumerate(reader, start=1):
                location = f"{path}:{reader.line_num}"
                if None in values or None in values.values():
                    problem = f"it does not have {len(reader.fieldnames or ())} cells as the header"
                    yield Row(location, number, problem=problem)
                else:
                    yield Row(location, number, {k: v or None for k, v in values.items()})
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"file {path} cannot be read: {error}") from error
