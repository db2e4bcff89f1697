"""What the converters share: the command, the checks of every row, and whole files or none.

A converter reads one dataset in the form that its authors publish and yields ``ConvertedRow`` and
``RefusedRow`` rows; everything else happens here, the same for all of them. A row is written only
if the toolkit's own loader accepts it.
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
"""Pillow decodes no larger image."""
OUTSIDE = 1.0
"""Pixels by which a box may leave its image: annotations round, and no evaluation drops these."""
_REASONS_KEPT = 1000
"""RefusedRow rows that the summary file lists; all are counted."""


@dataclass(frozen=True)
class Request:
    """What a converter is asked to read.

    Attributes:
        source: a path, or the name of a table as ``sources.read_table`` takes it.
        images: the folder that the rows' image paths are relative to.
        split: one of the converter's splits.
        task: the task that the rows are for.
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
    """One row of a source.

    Attributes:
        id: unique within the output.
        images: a path relative to the images' folder, an encoded image, or None where the source
            has lost it.
        question: as in ``Example``.
        answer: in the task's own form; boxes are xyxy in pixels.
        meta: what to group scores by, and whatever else is worth keeping.
    """

    id: str
    images: tuple[str | bytes | None, ...]
    question: str
    answer: Any
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RefusedRow:
    """A row of the source that becomes none of the output, and why.

    Attributes:
        id: names the row.
        reason: the kind of reason, the same words for every such row.
        detail: more about this one.
    """

    id: str
    reason: str
    detail: str = ""


@dataclass
class Summary:
    """What became of the rows of a source."""

    read: int = 0
    written: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    refused: list[RefusedRow] = field(default_factory=list)

    def refuse(self, row: RefusedRow) -> None:
        self.reasons[row.reason] += 1
        if len(self.refused) < _REASONS_KEPT:
            self.refused.append(row)

    def lines(self) -> Iterator[str]:
        """For people: the counts, then each reason with its first row."""
        refused = sum(self.reasons.values())
        left = self.read - self.written - refused
        drawn = f", not drawn {left}" if left else ""
        yield f"rows read {self.read}, written {self.written}, refused {refused}{drawn}"
        for reason, count in self.reasons.most_common():
            rows = [row for row in self.refused if row.reason == reason][:1]
            first = [f" (first: {': '.join(filter(None, (r.id, r.detail)))})" for r in rows]
            yield f"  {count} × {reason}{''.join(first)}"


@dataclass(frozen=True)
class Converter:
    """One dataset's converter and its command line.

    Attributes:
        about: what it reads; the module's docstring.
        read: yields the rows of a request, in an order that is always the same.
        tasks: tasks that it makes rows for, the default one first.
        splits: the dataset's splits, the default one first.
        options: options of the task under which rows are checked.
    """

    about: str
    read: Callable[[Request], Iterable[ConvertedRow | RefusedRow]]
    tasks: tuple[str, ...]
    splits: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """The command; returns the process's exit status."""
        arguments = self._parser().parse_args(argv)
        request = Request(arguments.source, arguments.images, arguments.split, arguments.task)
        try:
            _Run(self, request, arguments.out, arguments.limit, arguments.seed).convert()
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from here", file=sys.stderr)
            return 130
        return 0

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--source", required=True, help="the dataset as it was published")
        parser.add_argument(
            "--images", type=Path, required=True, help="folder of the images, data.image_root later"
        )
        parser.add_argument("--split", choices=self.splits, default=self.splits[0])
        parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to make")
        parser.add_argument("--limit", type=_positive, help="draw so many rows; without it, all")
        parser.add_argument("--seed", type=int, default=0, help="which rows --limit draws")
        parser.add_argument(
            "--task", choices=self.tasks, default=self.tasks[0], help="which task the rows are for"
        )
        return parser


class _Run:
    """One conversion: the rows go into a file aside, which becomes ``out`` when it is whole."""

    def __init__(
        self, converter: Converter, request: Request, out: Path, limit: int | None, seed: int
    ) -> None:
        if out.suffix != ".jsonl":
            raise UserError(f"--out {out} must end in .jsonl")
        self.converter, self.request, self.out = converter, request, out
        self.limit, self.seed = limit, seed
        self.summary_path = out.with_suffix(".summary.json")
        self.part = out.with_name(f".{out.name}.{self._fingerprint()[:8]}.part")
        self.summary = Summary()
        self.new_images: list[Path] = []

    def convert(self) -> None:
        if self.out.exists():
            self._check_finished()
            print(f"{self.out} is finished already and is left alone")
            return
        task = load_task(self.request.task, **self.converter.options)
        self.request.images.mkdir(parents=True, exist_ok=True)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write(task)
            if not self.summary.written:
                lines = "\n".join(self.summary.lines())
                raise UserError(f"{self.request.source} gave no row to write\n{lines}")
        except UserError:  # what is wrong with the source is wrong at the next try too
            for path in [self.part, *self.new_images]:
                path.unlink(missing_ok=True)
            raise
        self.summary_path.write_text(json.dumps(self._record(), indent=1, ensure_ascii=False))
        os.replace(self.part, self.out)
        print("\n".join(self.summary.lines()))
        print(f"wrote {self.out}; its images are relative to {self.request.images}")

    def _write(self, task: Task) -> None:
        done = self._resume()
        with self.part.open("a", encoding="utf-8") as file:
            for row in self._rows(task, done):
                if row["id"] not in done:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    file.flush()
                self.summary.written += 1

    def _resume(self) -> set[str]:
        """Ids of the rows that an interrupted run has written; a torn last line is cut off."""
        if not self.part.exists():
            return set()
        whole = self.part.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        with self.part.open("r+b") as file:
            file.truncate(len(whole))
        ids = {json.loads(line)["id"] for line in whole.splitlines()}
        print(f"going on after {len(ids)} rows of an interrupted run")
        return ids

    def _rows(self, task: Task, done: set[str]) -> Iterator[dict[str, Any]]:
        """The checked rows to write, in the source's order, with a bar in a terminal."""
        reader = ImageReader(self.request.images, MAX_IMAGE_PIXELS)
        console = Console(stderr=True)
        columns = (TextColumn("rows"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            shown = bar.add_task("rows", total=None)
            found = self._found(lambda: bar.advance(shown))
            if self.limit is None:
                for item in found:
                    if item.id in done:
                        yield {"id": item.id}
                    elif row := self._checked(item, task, reader):
                        yield row
            else:
                yield from self._drawn(found, task, reader)

    def _drawn(
        self, found: Iterator[ConvertedRow], task: Task, reader: ImageReader
    ) -> Iterator[dict[str, Any]]:
        """``limit`` rows chosen by a hash of seed and id, so the source's order has no say.

        Twice as many are drawn as wanted, since some may turn out bad.
        """
        limit = self.limit or 0
        keyed = ((self._key(item.id), place, item) for place, item in enumerate(found))
        rows: list[tuple[int, dict[str, Any]]] = []
        for _, place, item in heapq.nsmallest(2 * limit, keyed):
            if len(rows) < limit and (row := self._checked(item, task, reader)):
                rows.append((place, row))
        yield from (row for _, row in sorted(rows, key=lambda pair: pair[0]))

    def _key(self, identity: str) -> str:
        return hashlib.sha256(f"{self.seed}/{identity}".encode()).hexdigest()

    def _found(self, advance: Callable[[], None]) -> Iterator[ConvertedRow]:
        """The converter's rows with unique ids; what it refuses is noted."""
        seen: set[str] = set()
        try:
            for item in self.converter.read(self.request):
                self.summary.read += 1
                advance()
                if isinstance(item, RefusedRow):
                    self.summary.refuse(item)
                elif item.id in seen:
                    self.summary.refuse(RefusedRow(item.id, "its id is used by an earlier row"))
                else:
                    seen.add(item.id)
                    yield item
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"{self.request.source} has not the published layout of this dataset "
                f"({type(error).__name__}: {error})"
            ) from error

    def _checked(
        self, item: ConvertedRow, task: Task, reader: ImageReader
    ) -> dict[str, Any] | None:
        """The row as it is written, or None where the loader would refuse it."""
        if None in item.images:
            self.summary.refuse(RefusedRow(item.id, "its image is missing in the source"))
            return None
        try:
            row = {
                "id": item.id,
                "images": [self._path(image, reader) for image in item.images],
                "question": item.question,
                "answer": item.answer,
                "meta": dict(item.meta),
            }
            example = to_example(Row(item.id, 0, row, strict=True), {}, reader, task)
        except ValueError as error:
            self.summary.refuse(RefusedRow(item.id, _kind(str(error)), str(error)))
            return None
        size = example.images[0].size if example.images else (0, 0)
        boxes = item.answer.get("boxes", ()) if isinstance(item.answer, Mapping) else ()
        if outside := [box for box in boxes if _leaves(box, size)]:
            detail = f"{outside[0]} in {size[0]}x{size[1]}"
            self.summary.refuse(RefusedRow(item.id, "a box leaves its image", detail))
            return None
        return row

    def _path(self, image: str | bytes | None, reader: ImageReader) -> str:
        """The image's path; an embedded one is first written under its content's hash."""
        if isinstance(image, str):
            return image
        data = image or b""
        reader.read(data, "the embedded image")  # raises on what is no image
        folder = self.request.images / self.out.stem
        path = folder / f"{hashlib.sha256(data).hexdigest()[:20]}{_suffix(data)}"
        if not path.exists():
            folder.mkdir(exist_ok=True)
            aside = path.with_name(f".{path.name}")
            aside.write_bytes(data)
            os.replace(aside, path)
            self.new_images.append(path)
        return path.relative_to(self.request.images).as_posix()

    def _fingerprint(self) -> str:
        """Differs between any two commands that could write different rows."""
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
                f"{self.out} exists, and this command with this source did not make it: "
                "delete it, or name another --out"
            )

    def _record(self) -> dict[str, Any]:
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
    """A foreign answer in the task's own form, or None where it cannot be read as one."""
    kinds = {"grounding": dict, "detection": dict, "counting": int, "ocr": (str, list)}
    readings = get_answer_candidates(value)
    return next((reading for reading in readings if isinstance(reading, kinds[task])), None)


def _leaves(box: Sequence[float], size: tuple[int, int]) -> bool:
    x1, y1, x2, y2 = box
    inside = x1 >= -OUTSIDE and y1 >= -OUTSIDE
    return not (inside and x2 <= size[0] + OUTSIDE and y2 <= size[1] + OUTSIDE)


def _kind(problem: str) -> str:
    """The kind of a loader's problem, by its first word."""
    words = {"image": "its image cannot be used", "box": "a box is no box"}
    return words.get(problem.split(maxsplit=1)[0], "the task does not accept its answer")


def _suffix(data: bytes) -> str:
    """The file name's ending by the first bytes; readers go by the bytes, people by the name."""
    known = {b"\x89PNG": ".png", b"\xff\xd8": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}
    return next((end for start, end in known.items() if data.startswith(start)), ".img")


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number
