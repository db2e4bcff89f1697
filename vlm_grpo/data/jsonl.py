"""Reading JSON Lines, one object per line, with limits on the length and nesting of a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError

MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 32
"""Deepest nesting of lists and objects; a row whose answer is a list of boxes has four."""


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield a row for each line that is not blank; a malformed line yields a row with a problem.

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
                yield _parse_row(line, location, number)


def _parse_row(line: bytes, location: str, number: int) -> Row:
    try:
        values = parse_object(line)
    except ValueError as error:
        return Row(location, number, problem=str(error))
    return Row(location, number, values, strict=True)


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse one line as a JSON object.

    Raises:
        ValueError: the line is not a JSON object or is nested too deeply.
    """
    value = parse_json(line.rstrip(), "the line")
    if not isinstance(value, dict):
        raise ValueError(f"the line must be a JSON object, not a {type(value).__name__}")
    return value


def parse_json(data: bytes, what: str) -> Any:
    """Parse a JSON value; ``what`` names it in messages.

    Raises:
        ValueError: it is not JSON or is nested too deeply.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " * (error.lineno > 1) + f"column {error.colno}"
        raise ValueError(f"{what} is not JSON: {error.msg} at {place}") from error
    except ValueError as error:  # a refused constant, or a number with thousands of digits
        raise ValueError(f"{what} is not JSON: {error}") from error
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}")
    return value


def _depth(value: Any) -> int:
    """Count the levels of nesting, without recursion."""
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
    raise ValueError(f"it contains {name}")


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass
