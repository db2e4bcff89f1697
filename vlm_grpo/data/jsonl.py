"""Reading JSON and JSON Lines, with limits on the length and nesting of a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    """Return the value in a JSON file; raise a UserError if it cannot be read."""
    try:
        return parse_json(path.read_bytes(), "it")
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"file {path}: {error}; a file with one object per line needs the suffix .jsonl"
        ) from error


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
    level = [value]
    for _ in range(MAX_DEPTH + 1):  # without recursion
        lists = [item for item in level if isinstance(item, list)]
        level = [item for inner in lists for item in inner] + [
            item for inner in level if isinstance(inner, dict) for item in inner.values()
        ]
        if not level:
            return value
    raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it contains {name}")
