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
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vlm_grpo.config.data import PILLOW_WARNS_AT, PYTHON, SourceSettings
from vlm_grpo.data.images import MediaReader
from vlm_grpo.data.rows import Row, to_example
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.registry import load_task
from vlm_grpo.utils.atomic_io import write_atomic
from vlm_grpo.utils.jsonl import read_rows

_LISTED_ROWS = 1000  # Number of refused rows that the summary file lists; all are counted

ExpectedCounts = Mapping[str, int]
"""Number of rows by the name of what has it: the split, one of several datasets, or a file."""
RawRecord = dict[str, Any]  # one row, annotation or entry in the form of its source
Image = str | bytes | None
"""A path relative to the image folder, encoded image bytes, or None if the source has no image."""


@dataclass(frozen=True)
class ConvertedRow:
    """One row of the output."""

    id: str  # unique within the output
    images: tuple[Image, ...]
    question: str  # as in ``Example``
    answer: Any  # in the task's form; boxes are xyxy in pixels
    # fields to group scores by, and other fields worth keeping
    meta: Mapping[str, Any] = field(default_factory=dict)
    videos: tuple[str, ...] = ()  # paths of its videos in the image folder


@dataclass(frozen=True)
class RefusedRow:
    """A row of the source that is not converted."""

    id: str  # identifies the row
    reason: str  # category of the problem; the summary counts rows by it
    detail: str = ""  # details of this row's problem
    # "lost": it should have been converted; "excluded": the converter leaves out such rows by
    # definition; "source": it stands for a defect of the source, and is no row
    kind: Literal["lost", "excluded", "source"] = "lost"


Rows = Iterator[ConvertedRow | RefusedRow]  #: A converter's rows, one for each row of the source


@dataclass(frozen=True)
class Request:
    """The source that a converter reads.

    A file that is missing, truncated or malformed raises ``UserError`` with its name.
    """

    source: str  # a path, or ``hf:NAME[:SPLIT[:CONFIG]]``
    images: Path  # the folder that the rows' image paths are relative to
    split: str  # one of the converter's splits
    task: str  # name of the task that the rows are converted for

    @property
    def path(self) -> Path:
        """The source as a path, with ``~`` replaced by the home folder."""
        try:
            return Path(os.path.expanduser(self.source))
        except RuntimeError as error:
            raise UserError(f"{self.source}: {error}") from error

    def find_file(self, *patterns: str) -> Path:
        """Return the source if it is a file, else the only match of the first glob with matches."""
        path = self.path
        if path.is_file():
            return path
        for pattern in patterns:
            found = sorted(path.glob(pattern))
            if len(found) > 1:
                names = ", ".join(map(str, found[:5]))
                raise UserError(
                    f"{self.source} holds several {pattern} ({names}): pass one as --source"
                )
            if found:
                return found[0]
        raise UserError(f"{self.source} is not a file and holds no {' or '.join(patterns)}")

    def list_files(self, pattern: str) -> list[Path]:
        """Return the files of the split, in the folder of its name if the source has one."""
        folder = self.path / self.split
        files = sorted((folder if folder.is_dir() else self.path).glob(pattern))
        if not files:
            raise UserError(f"{self.source} holds no {pattern} of split {self.split}")
        return files

    def read_table(self, *columns: str) -> Iterator[RawRecord]:
        """Yield the rows of a table, images as encoded bytes; None: the cell has none.

        The source is ``hf:…``, a folder saved by ``datasets``, a ``.parquet`` file, or a folder
        with parquet files whose names begin with the split. The rows must have the columns.
        """
        for row in self._read_table():
            if missing := ", ".join(name for name in columns if name not in row.values):
                found = ", ".join(row.values)
                raise UserError(f"{row.location} has no column {missing}; it has {found}")
            yield {name: _get_bytes(value) for name, value in row.values.items()}

    def _read_table(self) -> Iterator[Row]:
        from vlm_grpo.data.hub import read_hub, read_parquet  # slow to import

        path = self.path
        parts = [path] if path.is_file() else sorted(path.glob(f"**/{self.split}[-._]*parquet"))
        if not parts:
            name, _, rest = self.source.removeprefix("hf:").partition(":")
            yield from read_hub(f"{name}:{rest or self.split}", "eval")
        elif path.is_dir():
            _check_all_parts(parts)
        for part in parts:
            yield from read_parquet(part)


def _get_bytes(value: Any) -> Any:
    """Return the bytes of an image, or of each in a list; any other value as it is."""
    if isinstance(value, list):
        return [_get_bytes(item) for item in value]
    is_image = isinstance(value, Mapping) and "bytes" in value and {*value} <= {"bytes", "path"}
    return value["bytes"] if is_image else value


def _check_all_parts(parts: Sequence[Path]) -> None:
    """Raise ``UserError`` if a part of a table is missing, by names like ``a-00001-of-00003``."""
    names = ((p.parent, re.fullmatch(r"(.*)-\d+-of-(\d+)\.parquet", p.name)) for p in parts)
    found = Counter((folder, name[1], int(name[2])) for folder, name in names if name)
    for (folder, name, total), count in found.items():
        if count < total:
            raise UserError(f"{folder} has {count} of the {total} parts of {name}: add the others")


@dataclass
class Summary:
    """Counts of the rows read and written, and of the refused rows by kind and by reason."""

    read: int = 0
    written: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    refused: list[RefusedRow] = field(default_factory=list)

    def refuse(self, row: RefusedRow) -> None:
        self.kinds[row.kind] += 1
        self.reasons[row.reason] += 1
        if len(self.refused) < _LISTED_ROWS:
            self.refused.append(row)

    def format_lines(self) -> Iterator[str]:
        """Yield the counts, then each reason with its first row, for printing."""
        excluded, lost = self.kinds["excluded"], self.kinds["lost"]
        not_sampled = self.read - self.written - excluded - lost
        counts = [f"rows read {self.read:,}", f"written {self.written:,}"]
        counts += [f"left out {excluded:,}"] if excluded else []
        counts += [f"refused {lost:,}"]
        counts += [f"not sampled {not_sampled:,}"] if not_sampled else []
        yield ", ".join(counts)
        for reason, count in self.reasons.most_common():
            rows = [row for row in self.refused if row.reason == reason][:1]
            first = [f" (first: {': '.join(filter(None, (r.id, r.detail)))})" for r in rows]
            yield f"  {count:,} × {reason}{''.join(first)}"

    def find_shortfall(self, expected: ExpectedCounts) -> str | None:
        """Return what the output lacks, or None if it is complete.

        The source must have one of the ``expected`` numbers of rows; if they are not known, only
        its own rows must not be lost.
        """
        lost = self.kinds["lost"]
        is_whole = not self.kinds["source"] and (not expected or self.read in expected.values())
        if is_whole and not lost:
            return None
        counts = " or ".join(f"{count:,} ({name})" for name, count in expected.items())
        numbers = f"expected {counts or 'every row'}, found {self.read:,}, dropped {lost:,}"
        return "\n".join([f"rows are missing: {numbers}", *self.format_lines()])


def select_counts(counts: int | ExpectedCounts | None, split: str, source: Path) -> ExpectedCounts:
    """Return the published numbers of rows that a source may have; none if it is not published.

    ``counts`` is the split's number of rows; several by the dataset's name; or by the names of
    published ``.json`` and ``.jsonl`` files, which say nothing of other files.
    """
    if isinstance(counts, int):
        return {split: counts}
    named = dict(counts or {})
    files = [name for name in named if name.endswith((".json", ".jsonl"))]
    found = [name for name in files if source.name == name or any(source.rglob(name))]
    return {name: named[name] for name in named if name not in files or name in found}


@dataclass(frozen=True)
class Converter:
    """A dataset's converter and its command line."""

    description: str  # the module's docstring, shown by ``--help``
    read: Callable[[Request], Rows]  # yields the rows of a request, always in the same order
    tasks: tuple[str, ...]  # tasks that it writes rows for; the first is the default
    # the published number of source rows by split, as ``select_counts`` accepts it; the first split
    # is the default
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
        add = parser.add_argument
        add("--source", required=True, help="the dataset as published")
        add("--images", type=Path, required=True, help="image folder; becomes data.image_root")
        add("--split", choices=self.splits, default=next(iter(self.splits)))
        add("--out", type=Path, required=True, help="the .jsonl file to write")
        add("--limit", type=_positive, help="number of rows to sample; default: all rows")
        add("--seed", type=int, default=0, help="seed of the sampling by --limit")
        add("--allow-partial", action="store_true", help="write the output if rows are missing")
        add(
            "--task", choices=self.tasks, default=self.tasks[0], help="task to convert the rows for"
        )
        return parser


def converter(
    tasks: tuple[str, ...], splits: Mapping[str, int | ExpectedCounts | None]
) -> Callable[[Callable[[Request], Rows]], Converter]:
    """Turn a function that reads a dataset into its converter, with its module's docstring.

    The function is the last one of its module: under ``python -m``, its command line runs here.
    """

    def build(read: Callable[[Request], Rows]) -> Converter:
        module = read.__globals__
        built = Converter(module["__doc__"] or "", read, tasks, splits)
        if module["__name__"] == "__main__":
            raise SystemExit(built.main())
        return built

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
        """Return what the output lacks if ``--allow-partial`` allows that."""
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
        ids = {row["id"] for row in read_rows(self.partial_path, truncate=True)}
        print(f"resuming after {len(ids):,} rows of an interrupted run")
        return ids

    def _valid_rows(self, task: Task, done: set[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the id and line of each row to write; the line of one that is written is empty."""
        reader = MediaReader(self.request.images, PILLOW_WARNS_AT)
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
        self, converted: Iterator[ConvertedRow], task: Task, reader: MediaReader
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

    def _validate(self, item: ConvertedRow, task: Task, reader: MediaReader) -> bytes | None:
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
            source = SourceSettings(source=PYTHON)
            to_example(Row(item.id, 0, row, strict=True), source, reader, task)
        except ValueError as error:
            self.summary.refuse(RefusedRow(item.id, _categorize(str(error)), str(error)))
            return None
        try:
            line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
        except (ValueError, TypeError) as error:  # NaN, half a surrogate pair, a date
            self.summary.refuse(RefusedRow(item.id, "it cannot be written as JSON", str(error)))
            return None
        return line

    def _store_image(self, image: Image, reader: MediaReader) -> str:
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


def _categorize(problem: str) -> str:
    """Return the category of a loader's problem."""
    if "is outside its image" in problem:
        return "a box extends beyond its image"
    # By its first word.
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
