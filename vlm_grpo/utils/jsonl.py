"""Reading JSON files, and the JSON Lines files to which a run appends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlm_grpo.errors import UserError


def parse_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the object of each line that is not blank.

    The object is None if the line does not contain one. A missing file has no lines.
    """
    if not path.is_file():
        return
    # Not splitlines: texts may contain Unicode line separators, which do not end a line here.
    for number, line in enumerate(path.read_text("utf-8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield number, row if isinstance(row, dict) else None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} cannot be read: it is not a JSON object")
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, without a last line that a crash has truncated.

    Raises:
        UserError: a line before the last one is not a JSON object.
    """
    lines = list(parse_lines(path))
    if lines and lines[-1][1] is None:
        lines.pop()
    rows = []
    for number, row in lines:
        if row is None:
            raise UserError(f"{path}:{number} is not a JSON object: repair or delete the line")
        rows.append(row)
    return rows


def read_complete_rows(path: Path, truncate: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file that was appended to line by line, up to the last line break.

    Args:
        path: the file.
        truncate: also remove an incomplete last line from the file.

    Raises:
        UserError: a complete line is not a JSON object.
    """
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if truncate and len(complete) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    for number, line in enumerate(complete.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is not a JSON object: repair or delete the line")
        yield row
