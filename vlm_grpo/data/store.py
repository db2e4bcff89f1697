"""Examples on disk: memory holds one position per example, however large the dataset is."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import weakref
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from vlm_grpo.errors import UserError
from vlm_grpo.types import Example, TableCell

_BUFFER_BYTES = 2**20  # Number of bytes that are written at once


class _Examples(Sequence[Example]):
    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]
        return self._read(numbers) if isinstance(numbers, int) else list(map(self._read, numbers))

    @abstractmethod
    def _read(self, number: int) -> Example:
        """Return the example of a number, from 0."""


class _Pickler(pickle.Pickler):
    """A pickler that leaves the cells of tables where they are."""

    def __init__(self, file: io.BytesIO, tables: dict[int, Any]) -> None:
        super().__init__(file, protocol=5)
        self._tables = tables

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, TableCell):
            return None
        self._tables[id(obj.table)] = obj.table
        return id(obj.table), obj.row, obj.column, obj.item


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tables: dict[int, Any]) -> None:
        super().__init__(file)
        self._tables = tables

    def persistent_load(self, pid: Any) -> TableCell:
        number, *place = pid
        return TableCell(self._tables[number], *place)


class ExampleStore(_Examples):
    """Checked examples in a temporary file without a name, which disappears with the process.

    A run keeps its examples as they were checked, even if their source changes meanwhile. Images
    stay where they are: a file, a part of an archive, or a cell of a memory-mapped table.
    """

    def __init__(self) -> None:
        self._file, path = tempfile.mkstemp(prefix="vlm-grpo-")
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        self._buffer = bytearray()
        self._ends = array("Q", [0])
        self._tables: dict[int, Any] = {}

    def append(self, example: Example) -> None:
        file = io.BytesIO()
        _Pickler(file, self._tables).dump(replace(example, meta=dict(example.meta)))
        self._buffer += file.getbuffer()
        self._ends.append(self._ends[-1] + file.tell())
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is still buffered, after which threads and forked processes may read."""
        try:
            while self._buffer:
                del self._buffer[: os.write(self._file, self._buffer)]
        except OSError as error:
            raise UserError(
                f"the examples cannot be kept in {tempfile.gettempdir()}: {error.strerror}; set "
                "TMPDIR to a folder with more space"
            ) from error

    def __len__(self) -> int:
        return len(self._ends) - 1

    def _read(self, number: int) -> Example:
        start, end = self._ends[number], self._ends[number + 1]
        if self._buffer:
            self.flush()
        # pread, because threads read at once and forked processes share the file's position.
        data = os.pread(self._file, end - start, start)
        return _Unpickler(io.BytesIO(data), self._tables).load()


class ExampleView(_Examples):
    """Some examples, or all, of sequences that follow each other and stay where they are."""

    def __init__(self, *parts: Sequence[Example], chosen: Iterable[int] | None = None) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]
        self._chosen = range(self._starts[-1]) if chosen is None else array("Q", chosen)

    def __len__(self) -> int:
        return len(self._chosen)

    def _read(self, number: int) -> Example:
        place = self._chosen[number]
        part = bisect_right(self._starts, place) - 1
        return self._parts[part][place - self._starts[part]]
