"""Reading JSON files, and reading and writing JSON Lines."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from vlm_grpo.errors import UserError


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; ``UserError``: there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} cannot be read: it is not a JSON object")
    return found


def read_rows(path: Path, truncate: bool = False) -> list[dict[str, Any]]:
    """Return the objects of a file that a run appends to; ``UserError``: a line is no JSON object.

    What follows the last line break was cut off by a crash: it is not read, and with ``truncate``
    removed, so that the next line does not continue it."""
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if truncate and len(complete) < len(content):
        os.truncate(path, len(complete))
    rows = []
    for number, row in parse_lines(complete):
        if row is None:
            raise UserError(f"{path}:{number} is not a JSON object: repair or delete the line")
        rows.append(row)
    return rows


def read_valid_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, whatever else it has; a missing file has none."""
    content = path.read_bytes() if path.is_file() else b""
    return [row for _, row in parse_lines(content) if row is not None]


def parse_lines(content: bytes) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the object, None if it has none, of each line that is not blank."""
    # Not splitlines: texts may contain other separators, which do not end a line here.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield number, row if isinstance(row, dict) else None


def format_row(row: Mapping[str, Any]) -> str:
    """Return a row, whose values may be of any type, as a line of JSON without its end."""
    return json.dumps(row, ensure_ascii=False, default=_to_json)


def format_rows(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return rows as JSON Lines; a lone surrogate, which UTF-8 cannot encode, is its escape."""
    return "".join(f"{format_row(row)}\n" for row in rows).encode(errors="backslashreplace")


def _to_json(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else str(value)
