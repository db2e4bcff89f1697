"""The command line shared by all converters: row checks, resuming and atomic output.

A converter reads one dataset in its published form and yields a ``ConvertedRow`` or a
``RefusedRow`` for each source row. Everything else happens here. A row is written only if the
toolkit's own loader accepts it.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vlm_grpo.data.images import ImageReader
from vlm_grpo.data.rows import Row, get_answer_candidates, to_example
from vlm_grpo.errors import UserError
from vlm_grpo.registry import load_task
from vlm_grpo.task import Task

MAX_IMAGE_PIXELS = 2 * 89_478_485
"""Largest image that Pillow decodes."""
BOX_TOLERANCE = 1.0
"""Pixels by which a box may extend beyond its image. Annotations are rounded, and no official
evaluation drops such boxes."""
_LISTED_ROWS = 1000
"""Number of refused rows that the summary file lists; all are counted."""


@dataclass(frozen=True)
class Request:
    """The source that a converter reads.

    Attributes:
        source: a path, or the name of a table as ``readers.read_table`` accepts it.
        images: the folder that the rows' image paths are relative to.
        split: one of the converter's splits.
        task: name of the task that the rows are converted for.
    """

    source: str
    images: Path
    split: str
    task: str

    @property
    def path(self) -> Path:
        """The source as a path."""
        return Path(self.source).expanduser()


@dataclass(frozen=True)
class ConvertedRow:
    """One row of the output.

    Attributes:
        id: unique within the output.
        images: each a path relative to the image folder, encoded image bytes, or None if the source
            has no image.
        question: as in ``Example``.
        answer: in the task's form; boxes are xyxy in pixels.
        meta: fields to group scores by, and other fields worth keeping.
    """

    id: str
    images: tuple[str | bytes | None, ...]
    question: str
    answer: Any
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RefusedRow:
    """A row of the source that is not converted.

    Attributes:
        id: identifies the row.
        reason: category of the problem; the summary counts rows by it.
        detail: details of this row's problem.
    """

    id: str
    reason: str
    detail: str = ""


@dataclass
class Summary:
    """Counts of the rows read, written and refused."""

    read: int = 0
    written: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    refused: list[RefusedRow] = field(default_factory=list)

    def refuse(self, row: RefusedRow) -> None:
        self.reasons[row.reason] += 1
        if len(self.refused) < _LISTED_ROWS:
            self.refused.append(row)

    def format_lines(self) -> Iterator[str]:
        """Yield the counts, then each reason with its first row, for printing."""
        refused = sum(self.reasons.values())
        left_out = self.read - self.written - refused
        not_sampled = f", not sampled {left_out}" if left_out else ""
        yield f"rows read {self.read}, written {self.written}, refused {refused}{not_sampled}"
        for reason, count in self.reasons.most_common():
            rows = [row for row in self.refused if row.reason == reason][:1]
            first = [f" (first: {': '.join(filter(None, (r.id, r.detail)))})" for r in rows]
            yield f"  {count} × {reason}{''.join(first)}"


@dataclass(frozen=True)
class Converter:
    """A dataset's converter and its command line.

    Attributes:
        description: the module's docstring, shown by ``--help``.
        read: yields the rows of a request, always in the same order.
        tasks: tasks that it writes rows for; the first is the default.
        splits: the dataset's splits; the first is the default.
        options: task options to check the rows with.
    """

    description: str
    read: Callable[[Request], Iterable[ConvertedRow | RefusedRow]]
    tasks: tuple[str, ...]
    splits: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command line and return the process's exit status."""
        arguments = self._parser().parse_args(argv)
        request = Request(arguments.source, arguments.images, arguments.split, arguments.task)
        try:
            _Conversion(self, request, arguments.out, arguments.limit, arguments.seed).run()
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted: run the same command again to resume", file=sys.stderr)
            return 130
        return 0

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--source", required=True, help="the dataset as published")
        parser.add_argument(
            "--images", type=Path, required=True, help="image folder; becomes data.image_root"
        )
        parser.add_argument("--split", choices=self.splits, default=self.splits[0])
        parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
        parser.add_argument(
            "--limit", type=_positive, help="number of rows to sample; default: all rows"
        )
        parser.add_argument("--seed", type=int, default=0, help="seed of the sampling by --limit")
        parser.add_argument(
            "--task", choices=self.tasks, default=self.tasks[0], help="task to convert the rows for"
        )
        return parser


class _Conversion:
    """One run of a converter. It writes to a partial file and renames it to ``out`` at the end."""

    def __init__(
        self, converter: Converter, request: Request, out: Path, limit: int | None, seed: int
    ) -> None:
        if out.suffix != ".jsonl":
            raise UserError(f"--out {out} must end in .jsonl")
        self.converter, self.request, self.out = converter, request, out
        self.limit, self.seed = limit, seed
        self.summary_path = out.with_suffix(".summary.json")
        self.partial_path = out.with_name(f".{out.name}.{self._fingerprint()[:8]}.part")
        self.summary = Summary()
        self.new_images: list[Path] = []

    def run(self) -> None:
        if self.out.exists():
            self._check_finished()
            print(f"{self.out} is already complete; nothing to do")
            return
        task = load_task(self.request.task, **self.converter.options)
        self.request.images.mkdir(parents=True, exist_ok=True)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write(task)
            if not self.summary.written:
                lines = "\n".join(self.summary.format_lines())
                raise UserError(f"no row of {self.request.source} can be converted\n{lines}")
        except UserError:  # a retry would fail on the same source, so nothing is kept for it
            for path in [self.partial_path, *self.new_images]:
                path.unlink(missing_ok=True)
            raise
        self.summary_path.write_text(json.dumps(self._summary(), indent=1, ensure_ascii=False))
        os.replace(self.partial_path, self.out)
        print("\n".join(self.summary.format_lines()))
        print(f"wrote {self.out}; image paths are relative to {self.request.images}")

    def _write(self, task: Task) -> None:
        done = self._resume()
        with self.partial_path.open("a", encoding="utf-8") as file:
            for row in self._valid_rows(task, done):
                if row["id"] not in done:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    file.flush()
                self.summary.written += 1

    def _resume(self) -> set[str]:
        """Return the ids an interrupted run has written, and truncate an incomplete last line."""
        if not self.partial_path.exists():
            return set()
        content = self.partial_path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        with self.partial_path.open("r+b") as file:
            file.truncate(len(complete))
        ids = {json.loads(line)["id"] for line in complete.splitlines()}
        print(f"resuming after {len(ids)} rows of an interrupted run")
        return ids

    def _valid_rows(self, task: Task, done: set[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows to write in the source's order, with a progress bar in a terminal."""
        reader = ImageReader(self.request.images, MAX_IMAGE_PIXELS)
        console = Console(stderr=True)
        columns = (TextColumn("rows"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            progress = bar.add_task("rows", total=None)
            converted = self._unique_rows(lambda: bar.advance(progress))
            if self.limit is None:
                for item in converted:
                    if item.id in done:
                        yield {"id": item.id}
                    elif row := self._validate(item, task, reader):
                        yield row
            else:
                yield from self._sample(converted, task, reader)

    def _sample(
        self, converted: Iterator[ConvertedRow], task: Task, reader: ImageReader
    ) -> Iterator[dict[str, Any]]:
        """Yield ``limit`` rows chosen by a hash of seed and id, independent of the source's order.

        Twice as many candidates are considered, since some may be refused.
        """
        limit = self.limit or 0
        keyed = ((self._sort_key(item.id), index, item) for index, item in enumerate(converted))
        rows: list[tuple[int, dict[str, Any]]] = []
        for _, index, item in heapq.nsmallest(2 * limit, keyed):
            if len(rows) < limit and (row := self._validate(item, task, reader)):
                rows.append((index, row))
        yield from (row for _, row in sorted(rows, key=lambda pair: pair[0]))

    def _sort_key(self, row_id: str) -> str:
        return hashlib.sha256(f"{self.seed}/{row_id}".encode()).hexdigest()

    def _unique_rows(self, advance: Callable[[], None]) -> Iterator[ConvertedRow]:
        """Yield the converter's rows with unique ids, and record its refused rows."""
        ids: set[str] = set()
        try:
            for item in self.converter.read(self.request):
                self.summary.read += 1
                advance()
                if isinstance(item, RefusedRow):
                    self.summary.refuse(item)
                elif item.id in ids:
                    self.summary.refuse(RefusedRow(item.id, "its id is used by an earlier row"))
                else:
                    ids.add(item.id)
                    yield item
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{self.request.source} does not have the published layout of this dataset "
                f"({type(error).__name__}: {error})"
            ) from error

    def _validate(
        self, item: ConvertedRow, task: Task, reader: ImageReader
    ) -> dict[str, Any] | None:
        """Return the row as JSON, or None if the loader would refuse it."""
        if None in item.images:
            self.summary.refuse(RefusedRow(item.id, "its image is missing in the source"))
            return None
        try:
            row = {
                "id": item.id,
                "images": [self._store_image(image, reader) for image in item.images],
                "question": item.question,
                "answer": item.answer,
                "meta": dict(item.meta),
            }
            example = to_example(Row(item.id, 0, row, strict=True), {}, reader, task)
        except ValueError as error:
            self.summary.refuse(RefusedRow(item.id, _categorize(str(error)), str(error)))
            return None
        size = example.images[0].size if example.images else (0, 0)
        boxes = item.answer.get("boxes", ()) if isinstance(item.answer, Mapping) else ()
        if outside := [box for box in boxes if _extends_beyond(box, size)]:
            detail = f"{outside[0]} in {size[0]}x{size[1]}"
            self.summary.refuse(RefusedRow(item.id, "a box extends beyond its image", detail))
            return None
        return row

    def _store_image(self, image: str | bytes | None, reader: ImageReader) -> str:
        """Return the image's path; write embedded bytes to a file named by their hash."""
        if isinstance(image, str):
            return image
        data = image or b""
        reader.read(data, "the embedded image")  # raises if it is not an image
        folder = self.request.images / self.out.stem
        path = folder / f"{hashlib.sha256(data).hexdigest()[:20]}{_suffix(data)}"
        if not path.exists():
            folder.mkdir(exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            temporary.write_bytes(data)
            os.replace(temporary, path)
            self.new_images.append(path)
        return path.relative_to(self.request.images).as_posix()

    def _fingerprint(self) -> str:
        """Return a hash that differs between commands that could write different rows.

        It covers the text of ``Request``: renaming a field invalidates every earlier output.
        """
        source = Path(self.request.source).expanduser()
        stat = source.stat() if source.exists() else None
        version = (stat.st_size, stat.st_mtime_ns) if stat else ()
        request = (str(self.request), self.limit, self.seed, version)
        return hashlib.sha256(repr(request).encode()).hexdigest()

    def _check_finished(self) -> None:
        try:
            made_by = json.loads(self.summary_path.read_text())["made_by"]
        except (OSError, ValueError, KeyError):
            made_by = None
        if made_by != self._fingerprint():
            raise UserError(
                f"{self.out} exists and was made by another command or from another source: "
                "delete it, or choose another --out"
            )

    def _summary(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "made_by": self._fingerprint(),
            "source": self.request.source,
            "split": self.request.split,
            "task": self.request.task,
            "limit": self.limit,
            "seed": self.seed,
            "read": summary.read,
            "written": summary.written,
            "reasons": dict(summary.reasons),
            "refused": [vars(row) for row in summary.refused],
        }


def parse_foreign_answer(value: Any, task: str) -> Any | None:
    """Convert a foreign answer to the task's form, or return None if it cannot be read as one."""
    types = {"grounding": dict, "detection": dict, "counting": int, "ocr": (str, list)}
    candidates = get_answer_candidates(value)
    return next((answer for answer in candidates if isinstance(answer, types[task])), None)


def _extends_beyond(box: Sequence[float], size: tuple[int, int]) -> bool:
    x1, y1, x2, y2 = box
    inside = x1 >= -BOX_TOLERANCE and y1 >= -BOX_TOLERANCE
    return not (inside and x2 <= size[0] + BOX_TOLERANCE and y2 <= size[1] + BOX_TOLERANCE)


def _categorize(problem: str) -> str:
    """Return the category of a loader's problem, by its first word."""
    categories = {"image": "its image cannot be used", "box": "a box is malformed"}
    return categories.get(problem.split(maxsplit=1)[0], "the task does not accept its answer")


def _suffix(data: bytes) -> str:
    """Return the file suffix for the first bytes. Only people read it: loaders check the bytes."""
    known = {b"\x89PNG": ".png", b"\xff\xd8": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}
    return next((end for start, end in known.items() if data.startswith(start)), ".img")


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number
