"""Examples on disk: memory holds one position per example, however large the dataset is."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from vlm_grpo.errors import UserError
from vlm_grpo.types import Example, ImageRef, TableCell, VideoRef
from vlm_grpo.utils.chat import Turn

_BUFFER_BYTES = 2**20
"""Number of bytes that are written at once."""


class _Examples(Sequence[Example]):
    """A sequence of examples that are read one at a time."""

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        numbers = range(len(self))[index]
        return self._read(numbers) if isinstance(numbers, int) else list(map(self._read, numbers))

    @abstractmethod
    def _read(self, number: int) -> Example:
        """Return the example of a number, from 0."""


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
        self._tables: list[Any] = []

    def append(self, example: Example) -> None:
        """Add an example; errors are those of ``flush``."""
        images = [self._pack_image(image) for image in example.images]
        turns = [(turn.role, turn.text) for turn in example.history]
        fields = example.question, example.answer, dict(example.meta), example.location
        data = pickle.dumps((example.id, images, fields, turns, example.source), protocol=5)
        self._buffer += data
        self._ends.append(self._ends[-1] + len(data))
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is still buffered, after which threads and forked processes may read.

        Raises:
            UserError: the disk of the temporary folder is full.
        """
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
        name, images, fields, turns, source = pickle.loads(os.pread(self._file, end - start, start))
        references = tuple(self._unpack_image(*image) for image in images)
        history = tuple(Turn(*turn) for turn in turns)
        question, answer, meta, location = fields
        return Example(name, references, question, answer, meta, location, history, source)

    def _pack_image(self, image: ImageRef) -> tuple[Any, ...]:
        kept = image.name, image.size, image.path and str(image.path), self._pack(image.data)
        if not isinstance(image, VideoRef):
            return kept
        frames = [self._pack_image(frame) for frame in image.frames]
        return *kept, image.times, image.seconds, frames

    def _unpack_image(
        self, name: str, size: tuple[int, int], path: str | None, data: Any, *clip: Any
    ) -> ImageRef:
        common = name, size, size, Path(path) if path else None, self._unpack(data)
        if not clip:
            return ImageRef(*common)
        times, seconds, frames = clip
        references = tuple(self._unpack_image(*frame) for frame in frames)
        return VideoRef(*common, times=times, seconds=seconds, frames=references)

    def _pack(self, data: Any) -> Any:
        if not isinstance(data, TableCell):
            return data
        number = next((n for n, t in enumerate(self._tables) if t is data.table), None)
        if number is None:
            number = len(self._tables)
            self._tables.append(data.table)
        return number, data.row, data.column, data.item

    def _unpack(self, data: Any) -> Any:
        if not isinstance(data, tuple):
            return data
        number, *place = data
        return TableCell(self._tables[number], *place)


class SelectedExamples(_Examples):
    """Some examples of a sequence, which stay where they are."""

    def __init__(self, examples: Sequence[Example], indices: Iterable[int]) -> None:
        self._examples, self._indices = examples, array("Q", indices)

    def __len__(self) -> int:
        return len(self._indices)

    def _read(self, number: int) -> Example:
        return self._examples[self._indices[number]]


class JoinedExamples(_Examples):
    """The examples of several sequences, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Example]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def _read(self, number: int) -> Example:
        part = bisect_right(self._starts, number) - 1
        return self._parts[part][number - self._starts[part]]
