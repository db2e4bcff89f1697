"""Which entries the page shows, with their pictures, so that it stays small enough to send."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_grpo.report.entries import (
    Entry,
    as_json,
    held_out_entries,
    picture_names,
    spread_out,
    training_entries,
)
from vlm_grpo.report.run import Run

GALLERY_BYTES = 23_000_000
"""What entries and pictures may take together, so that the page stays below 25 MB."""


@dataclass(frozen=True)
class Gallery:
    """Entries and their pictures.

    Attributes:
        entries: what to show.
        pictures: a data URI for each name that the entries use and that has a file.
        left_out: entries left out to keep the page small.
        skipped: rows of a form that cannot be shown.
    """

    entries: tuple[Entry, ...]
    pictures: dict[str, str]
    left_out: int
    skipped: int


def gallery(runs: Sequence[tuple[str, Run]], limit: int = GALLERY_BYTES) -> Gallery:
    """The held-out answers of all runs, and of a single run the training groups too.

    Where that is too much, training groups are thinned out evenly over the steps first, then the
    last held-out examples are left out.

    Args:
        runs: what to call a run ("" where there is but one), and the run.
        limit: bytes that entries and pictures may take.
    """
    held_out, skipped = held_out_entries(runs)
    training: list[Entry] = []
    if len(runs) == 1:
        training, more = training_entries(runs[0][1])
        skipped += more
    folders = [run.folder / "samples" / "images" for _, run in runs]
    shelf = _Shelf(folders)
    everything = len(held_out) + len(training)
    chosen = _fitting(held_out, training, shelf, limit)
    names = sorted(set().union(*map(picture_names, chosen)))
    pictures = {name: uri for name in names if (uri := shelf.uri(name)) is not None}
    return Gallery(tuple(chosen), pictures, everything - len(chosen), skipped)


def _fitting(
    held_out: list[Entry], training: list[Entry], shelf: _Shelf, limit: int
) -> list[Entry]:
    steps = sorted({entry["step"] for entry in training})
    count = len(steps)
    while count > 1:
        kept = spread_out(steps, count)
        chosen = [*held_out, *(entry for entry in training if entry["step"] in kept)]
        if shelf.count_bytes(chosen) <= limit:
            return chosen
        count = count * 9 // 10
    chosen = [*held_out, *(training if count == len(steps) else ())]
    while chosen and shelf.count_bytes(chosen) > limit:
        chosen = chosen[: len(chosen) * 9 // 10]
    return chosen


class _Shelf:
    """The picture files of some runs; equal names are equal pictures."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self._sizes: dict[str, int] = {}
        self._texts: dict[int, int] = {}

    def count_bytes(self, entries: Sequence[Entry]) -> int:
        """Characters that the entries and their pictures take in the page."""
        for entry in entries:
            if id(entry) not in self._texts:
                self._texts[id(entry)] = len(as_json(entry))
        names = set().union(*map(picture_names, entries))
        return sum(map(self._size, names)) + sum(self._texts[id(entry)] for entry in entries)

    def uri(self, name: str) -> str | None:
        path = self._path(name)
        if path is None:
            return None
        return f"data:image/webp;base64,{base64.b64encode(path.read_bytes()).decode()}"

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            path = self._path(name)
            self._sizes[name] = 0 if path is None else path.stat().st_size * 4 // 3 + 100
        return self._sizes[name]

    def _path(self, name: str) -> Path | None:
        return next((f / name for f in self.folders if (f / name).is_file()), None)
