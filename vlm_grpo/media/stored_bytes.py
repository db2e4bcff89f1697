"""Parts of files and tables in which datasets hold their images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FileSlice:
    """A part of a file, such as a member of an archive, which is read when it is needed.

    Attributes:
        path: the file.
        start: position of the first byte.
        size: number of bytes.
    """

    path: Path
    start: int
    size: int

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            ValueError: the file cannot be read, or has become shorter.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.size)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from error
        if len(data) < self.size:
            raise ValueError(f"{self.path} has changed: it has become shorter")
        return data


@dataclass(frozen=True, eq=False)
class TableCell:
    """An encoded image in a table, such as a memory-mapped ``datasets.Dataset``.

    Pickled, for another process, it becomes the image's bytes.

    Attributes:
        table: the table; ``table[row][column]`` reads one cell.
        row, column: the cell: bytes, ``{"bytes": …}``, or a list of such values.
        item: position in the list; None: the cell is no list.
    """

    table: Any
    row: int
    column: str
    item: int | None = None

    def read(self) -> bytes:
        """Return the image's bytes."""
        value = self.table[self.row][self.column]
        value = value if self.item is None else value[self.item]
        return value["bytes"] if isinstance(value, Mapping) else value

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (self.read(),)
