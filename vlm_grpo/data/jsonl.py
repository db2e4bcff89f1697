"""JSON Lines, one object a line, within limits that no honest file reaches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError

MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 32
"""Deepest nesting of lists and objects; boxes in a list in an answer in a row make five."""


def read_jsonl(path: Path) -> Iterator[Row]:
    """The file's rows, one for each line that is not blank, bad ones included.

    Raises:
        UserError: the file cannot be opened.
    """
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
                _skip_line(file)
                problem = f"the line is longer than {MAX_LINE_BYTES} bytes"
                yield Row(location, number, problem=problem)
            elif line.strip():
                yield _row(line, location, number)


def _row(line: bytes, location: str, number: int) -> Row:
    try:
        values = parse_object(line)
    except ValueError as error:
        return Row(location, number, problem=str(error))
    return Row(location, number, values, strict=True)


def parse_object(line: bytes) -> dict[str, Any]:
    """One line as an object.

    Raises:
        ValueError: the line is no JSON object, or is nested too deep.
    """
    try:
        text = line.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ValueError(f"the line is nested deeper than {MAX_DEPTH}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is no JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # a constant that is refused, or a number of thousands of digits
        raise ValueError(f"the line is no JSON: {error}") from error
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"the line is nested deeper than {MAX_DEPTH}")
    if not isinstance(value, dict):
        raise ValueError(f"the line must be a JSON object, not a {type(value).__name__}")
    return value


def _depth(value: Any) -> int:
    """Levels of nesting, counted level by level, without recursion."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH + 1:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level, depth = inner, depth + 1
    return depth - 1


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}")


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass
