"""The command line shared by all converters: row checks, row counts, resuming, atomic output.

A converter reads one dataset in its published form and yields a ``ConvertedRow`` or a
``RefusedRow`` for each source row. Everything else happens here. A row is written only if the
toolkit's own loader accepts it, and the output only if no row is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vlm_grpo.config.data import PILLOW_WARNS_AT, VideoSettings
from vlm_grpo.data.images import ImageReader
from vlm_grpo.data.rows import Row, get_answer_candidates, to_example
from vlm_grpo.data.videos import VideoReader
from vlm_grpo.data_scripts.readers import Request
from vlm_grpo.data_scripts.rows import ConvertedRow, Image, RefusedRow, Rows
from vlm_grpo.data_scripts.summary import ExpectedCounts, Summary, select_counts
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.registry import load_task
from vlm_grpo.utils.atomic_io import write_atomic
from vlm_grpo.utils.jsonl import read_complete_rows

BOX_TOLERANCE = 1.0
"""Pixels by which a box may extend beyond its image. Annotations are rounded, and no official
evaluation drops such boxes."""


@dataclass(frozen=True)
class Converter:
    """A dataset's converter and its command line.

    Attributes:
        description: the module's docstring, shown by ``--help``.
        read: yields the rows of a request, always in the same order.
        tasks: tasks that it writes rows for; the first is the default.
        splits: the published number of source rows by split, as ``select_counts`` accepts it; the
            first split is the default.
    """

    description: str
    read: Callable[[Request], Rows]
    tasks: tuple[str, ...]
    splits: Mapping[str, int | ExpectedCounts | None]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command line and return the process's exit status."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a locale may be ASCII
        arguments = self._parser().parse_args(argv)
        try:
            _Conversion(self, arguments).run()
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
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
        parser.add_argument("--split", choices=self.splits, default=next(iter(self.splits)))
        parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
        parser.add_argument(
            "--limit", type=_positive, help="number of rows to sample; default: all rows"
        )
        parser.add_argument("--seed", type=int, default=0, help="seed of the sampling by --limit")
        parser.add_argument(
            "--allow-partial", action="store_true", help="write the output if rows are missing"
        )
        parser.add_argument(
            "--task", choices=self.tasks, default=self.tasks[0], help="task to convert the rows for"
        )
        return parser


def converter(
    tasks: tuple[str, ...], splits: Mapping[str, int | ExpectedCounts | None]
) -> Callable[[Callable[[Request], Rows]], Converter]:
    """Turn a function that reads a dataset into its converter, with its module's docstring.

    Args:
        tasks: as for ``Converter``.
        splits: as for ``Converter``.
    """

    def build(read: Callable[[Request], Rows]) -> Converter:
        return Converter(read.__globals__["__doc__"] or "", read, tasks, splits)

    return build


class _Conversion:
    """One run of a converter. It writes to a partial file and renames it to ``out`` at the end."""

    def __init__(self, converter: Converter, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out
        if self.out.suffix != ".jsonl":
            raise UserError(f"--out {self.out} must end in .jsonl")
        if self.out.is_dir():
            raise UserError(f"--out {self.out} is a folder: name a file in it")
        self.converter = converter
        self.request = Request(arguments.source, arguments.images, arguments.split, arguments.task)
        self.limit: int | None = arguments.limit
        self.seed: int = arguments.seed
        self.allow_partial: bool = arguments.allow_partial
        self.summary_path = self.out.with_suffix(".summary.json")
        self.partial_path = self.out.with_name(f".{self.out.name}.{self._fingerprint()[:8]}.part")
        self.summary = Summary()
        self.new_images: list[Path] = []

    def run(self) -> None:
        if self.out.exists():
            self._check_finished()
            print(f"{self.out} is already written; nothing to do")
            return
        task = load_task(self.request.task)
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"--out {self.out}: {self.out.parent} is not a folder") from error
        try:
            self._write(task)
            shortfall = self._check_rows()
        except UserError:  # a retry would fail on the same source, so nothing is kept for it
            for path in [self.partial_path, *self.new_images]:
                path.unlink(missing_ok=True)
            raise
        content = json.dumps(self._summary(shortfall), indent=1)
        write_atomic(self.summary_path, content.encode())
        self.partial_path.replace(self.out)
        print(shortfall or "\n".join(self.summary.format_lines()))
        print(f"wrote {self.out}; image paths are relative to {self.request.images}")

    def _check_rows(self) -> str | None:
        """Return what the output lacks if that is allowed.

        Raises:
            UserError: the output has no rows, or lacks rows and ``--allow-partial`` is not given.
        """
        request, lines = self.request, "\n".join(self.summary.format_lines())
        if not self.summary.written:
            raise UserError(f"no row of {request.source} can be converted\n{lines}")
        counts = self.converter.splits[request.split]
        expected = select_counts(counts, request.split, request.path)
        shortfall = self.summary.find_shortfall(expected)
        if shortfall is not None and not self.allow_partial:
            raise UserError(
                f"{request.source}, split {request.split}: {shortfall}\n"
                "nothing is written: repair the source or the image folder, or add "
                "--allow-partial to write the other rows"
            )
        return shortfall

    def _write(self, task: Task) -> None:
        done = self._resume()
        with self.partial_path.open("ab") as file:
            for row_id, line in self._valid_rows(task, done):
                if row_id not in done:
                    file.write(line)
                    file.flush()
                self.summary.written += 1

    def _resume(self) -> set[str]:
        """Return the ids an interrupted run has written, and truncate an incomplete last line."""
        if not self.partial_path.exists():
            return set()
        ids = {row["id"] for row in read_complete_rows(self.partial_path, truncate=True)}
        print(f"resuming after {len(ids):,} rows of an interrupted run")
        return ids

    def _valid_rows(self, task: Task, done: set[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the id and line of each row to write, in the source's order.

        A row that an interrupted run has written has an empty line. In a terminal, a progress bar
        is shown.
        """
        reader = VideoReader(self.request.images, PILLOW_WARNS_AT, VideoSettings())
        console = Console(stderr=True)
        columns = (TextColumn("rows"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            progress = bar.add_task("rows", total=None)
            converted = self._unique_rows(lambda: bar.advance(progress))
            if self.limit is None:
                for item in converted:
                    if item.id in done:
                        yield item.id, b""
                    elif line := self._validate(item, task, reader):
                        yield item.id, line
            else:
                yield from self._sample(converted, task, reader)

    def _sample(
        self, converted: Iterator[ConvertedRow], task: Task, reader: ImageReader
    ) -> Iterator[tuple[str, bytes]]:
        """Yield ``limit`` rows chosen by a hash of seed and id, independent of the source's order.

        Twice as many candidates are considered, since some may be refused.
        """
        limit = self.limit or 0
        keyed = ((self._sort_key(item.id), index, item) for index, item in enumerate(converted))
        rows: list[tuple[int, str, bytes]] = []
        for _, index, item in heapq.nsmallest(2 * limit, keyed):
            if len(rows) < limit and (line := self._validate(item, task, reader)):
                rows.append((index, item.id, line))
        yield from ((row_id, line) for _, row_id, line in sorted(rows))

    def _sort_key(self, row_id: str) -> str:
        text = f"{self.seed}/{row_id}"
        return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()

    def _unique_rows(self, advance: Callable[[], None]) -> Iterator[ConvertedRow]:
        """Yield the converter's rows with unique ids, and record its refused rows."""
        ids: set[str] = set()
        try:
            for item in self.converter.read(self.request):
                advance()
                is_refused = isinstance(item, RefusedRow)
                self.summary.read += not (is_refused and item.kind == "source")
                if is_refused:
                    self.summary.refuse(item)
                elif item.id in ids:
                    self.summary.refuse(RefusedRow(item.id, "its id is used by an earlier row"))
                else:
                    ids.add(item.id)
                    yield item
        except OSError as error:
            raise UserError(f"{self.request.source} cannot be read: {error}") from error
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"{self.request.source} does not have the published layout of this dataset "
                f"({type(error).__name__}: {error})"
            ) from error

    def _validate(self, item: ConvertedRow, task: Task, reader: ImageReader) -> bytes | None:
        """Return the row as a JSON line, or None if the loader would refuse it."""
        if None in item.images:
            self.summary.refuse(RefusedRow(item.id, "its image is missing in the source"))
            return None
        try:
            row = {
                "id": item.id,
                "images": [self._store_image(image, reader) for image in item.images],
                **({"videos": item.videos} if item.videos else {}),
                "question": item.question,
                "answer": item.answer,
                "meta": dict(item.meta),
            }
            example = to_example(Row(item.id, 0, row, strict=True), {}, reader, task)
        except ValueError as error:
            self.summary.refuse(RefusedRow(item.id, _categorize(str(error)), str(error)))
            return None
        try:
            line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
        except (ValueError, TypeError) as error:  # NaN, half a surrogate pair, a date
            self.summary.refuse(RefusedRow(item.id, "it cannot be written as JSON", str(error)))
            return None
        size = task.target_image(example).size if example.images else (0, 0)
        boxes = item.answer.get("boxes", ()) if isinstance(item.answer, Mapping) else ()
        if outside := [box for box in boxes if _extends_beyond(box, size)]:
            detail = f"{outside[0]} in {size[0]}x{size[1]}"
            self.summary.refuse(RefusedRow(item.id, "a box extends beyond its image", detail))
            return None
        return line

    def _store_image(self, image: Image, reader: ImageReader) -> str:
        """Return the image's path; write embedded bytes to a file named by their hash."""
        root = self.request.images
        if isinstance(image, str):
            if not root.is_dir():
                raise UserError(f"--images {root} is not a folder: name the one with the images")
            return image
        if not isinstance(image, bytes):
            raise ValueError(f"image must be a path or encoded bytes, not {image!r:.80}")
        reader.read(image, "the embedded image")  # raises if it is not an image
        path = root / self.out.stem / f"{hashlib.sha256(image).hexdigest()[:20]}{_suffix(image)}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, image)
            self.new_images.append(path)
        return path.relative_to(root).as_posix()

    def _fingerprint(self) -> str:
        """Return a hash that differs between commands that could write different rows.

        It covers the text of ``Request``: renaming a field invalidates every earlier output.
        """
        source = self.request.path
        stat = source.stat() if source.exists() else None
        version = (stat.st_size, stat.st_mtime_ns) if stat else ()
        request = (str(self.request), self.limit, self.seed, self.allow_partial, version)
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

    def _summary(self, shortfall: str | None) -> dict[str, Any]:
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
            "left_out": summary.kinds["excluded"],
            "lost": summary.kinds["lost"],
            "missing": shortfall,
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
