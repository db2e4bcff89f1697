"""Rows of JSON, JSON Lines and text tables, of folders of images, and of tar files (WebDataset)."""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from vlm_grpo.data.images import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError
from vlm_grpo.task.parsing import refuse_repeated_keys
from vlm_grpo.types import FileSlice

MAX_LINE_BYTES = 16 * 2**20
MAX_DEPTH = 32
"""Deepest nesting of lists and objects; a row whose answer is a list of boxes has four."""
CAPTION_QUESTION = "Describe the image in one sentence."
"""Question of rows whose source has captions and no questions."""
_CLASS_QUESTION = "What is in the image?"
_MAX_LISTED = 30  # Classes that a question lists; of more it names none
_FILE_COLUMNS = ("file_name", "file_names")
"""Columns of the images in a metadata file of ``datasets``."""
_TEXT_SUFFIXES = (".txt", ".cls", ".cap", ".caption", ".text")


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield a row for each line that is not blank; a malformed line yields a row with a problem."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    with file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            location = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                problem = f"the line is longer than {MAX_LINE_BYTES} bytes"
                yield Row(location, number, problem=problem)
            elif line.strip():
                try:
                    yield Row(location, number, parse_object(line), strict=True)
                except ValueError as error:
                    yield Row(location, number, problem=str(error))


def read_rows(path: Path, values: Sequence[Any]) -> Iterator[Row]:
    """Yield a row for each item of a JSON file's array."""
    for number, value in enumerate(values, start=1):
        location = f"{path} row {number}"
        if isinstance(value, dict):
            yield Row(location, number, value, strict=True)
        else:
            problem = f"it must be a JSON object, not a {type(value).__name__}"
            yield Row(location, number, problem=problem)


def read_json(path: Path) -> Any:
    try:
        return _parse_json(path.read_bytes(), "it")
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"file {path}: {error}; a file with one object per line needs the suffix .jsonl"
        ) from error


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse one line as a JSON object; ``ValueError``: it is none, or is nested too deeply."""
    value = _parse_json(line.rstrip(), "the line")
    if not isinstance(value, dict):
        raise ValueError(f"the line must be a JSON object, not a {type(value).__name__}")
    return value


def _parse_json(data: bytes, what: str) -> Any:
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=refuse_repeated_keys
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " * (error.lineno > 1) + f"column {error.colno}"
        raise ValueError(f"{what} is not JSON: {error.msg} at {place}") from error
    except ValueError as error:  # a refused constant or key, or a number with thousands of digits
        raise ValueError(f"{what} is not JSON: {error}") from error
    level = [value]
    for _ in range(MAX_DEPTH + 1):  # without recursion
        lists = [item for item in level if isinstance(item, list)]
        level = [item for inner in lists for item in inner] + [
            item for inner in level if isinstance(inner, dict) for item in inner.values()
        ]
        if not level:
            return value
    raise ValueError(f"{what} is nested deeper than {MAX_DEPTH}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it contains {name}")


def read_csv(path: Path) -> Iterator[Row]:
    """Yield a row for each record after the header; empty cells are missing values.

    The cells of a file with the suffix .tsv are separated by tabs. (The reader of ``datasets``
    would guess types, so that the answer 007 became 7, and names no line.)
    """
    is_tsv = path.suffix.lower() == ".tsv"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True, delimiter="\t" if is_tsv else ",")
            names: Sequence[str] = reader.fieldnames or ()
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"its header has {twice[0]} twice")
            if len(names) == 1 and any(mark in names[0] for mark in ",;\t|"):
                raise ValueError(
                    f"its header has the one column {names[0]}: cells are separated by "
                    + ("tabs" if is_tsv else "commas")
                )
            for number, values in enumerate(reader, start=1):
                location = f"{path}:{reader.line_num}"
                if None in values or None in values.values():
                    problem = f"it does not have {len(names)} cells as the header"
                    yield Row(location, number, problem=problem)
                else:
                    yield Row(location, number, {k: v or None for k, v in values.items()})
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"file {path} cannot be read: {error}") from error


def find_metadata(folder: Path) -> Path | None:
    paths = (folder / f"metadata{suffix}" for suffix in (".jsonl", ".csv"))
    return next((path for path in paths if path.is_file()), None)


def read_metadata(folder: Path) -> Iterator[Row]:
    """Yield the rows of a folder's metadata file; ``file_name`` is the column of the images."""
    path = find_metadata(folder) or folder
    rows: Iterable[Row] = (read_jsonl if path.suffix == ".jsonl" else read_csv)(path)
    for row in rows:
        values = row.values
        found = [column for column in _FILE_COLUMNS if column in values]
        if row.problem is None and len(found) > 1:
            yield replace(row, problem=f"it has {' and '.join(found)}: keep one of them")
        elif row.problem is None and not found and not {"image", "images"} & values.keys():
            yield replace(row, problem="it has no file_name, the path of its image")
        else:
            named = {"images" if k in _FILE_COLUMNS else k: v for k, v in values.items()}
            yield replace(row, values=named)


def list_classes(folder: Path) -> dict[str, list[Path]]:
    """Return the images of each subfolder that has some, by its name."""
    subs = sorted(sub for sub in folder.iterdir() if sub.is_dir() and sub.name[0] != ".")
    found = {
        s.name: sorted(p for p in s.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES) for s in subs
    }
    return {name: images for name, images in found.items() if images}


def read_classes(folder: Path) -> Iterator[Row]:
    """Yield a row per image, whose answer is the name of its subfolder."""
    classes = list_classes(folder)
    question = _CLASS_QUESTION
    if len(classes) <= _MAX_LISTED:
        question = f"Which of these is in the image: {', '.join(classes)}?"
    images = [(name, path) for name, paths in classes.items() for path in paths]
    for number, (name, path) in enumerate(images, start=1):
        place = path.relative_to(folder).as_posix()
        values = {"id": place, "images": [place], "answer": name}
        yield Row(str(path), number, values, question=question)


class _Member(NamedTuple):
    key: str  # of its sample
    suffix: str  # the rest of its name
    content: FileSlice
    problem: str | None


def read_tar(path: Path) -> Iterator[Row]:
    """Yield a row for each sample of a tar file, without reading its images.

    Consecutive members with one name are a sample. The object in its ``.json`` holds the columns,
    and its images are its column ``images`` (``.jpg``, ``0.png``, …) and its clips its column
    ``videos``. Its other texts are columns named by their suffix; without a ``.json``, one of them
    is the answer.
    """
    samples = groupby(_read_members(path), key=lambda member: member.key)
    for number, (key, members) in enumerate(samples, start=1):
        location = f"{path}: sample {key}"
        try:
            values, question = _read_sample(list(members))
        except ValueError as error:
            yield Row(location, number, problem=str(error))
        else:
            values.setdefault("id", f"{path.stem}/{key}")
            yield Row(location, number, values, question=question)


def _read_members(path: Path) -> Iterator[_Member]:
    end = 0
    try:
        size = path.stat().st_size
        with tarfile.open(path, "r:") as file:
            while (info := file.next()) is not None:
                vars(file)["members"].clear()  # it would keep all of them
                if info.isdir():
                    continue
                content = FileSlice(path, info.offset_data, info.size)
                if content.start + content.size > size:
                    raise tarfile.ReadError(f"member {info.name} is truncated")
                end = content.start + -(-content.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                name, problem = PurePosixPath(info.name), None
                if not info.isreg():
                    problem = f"member {info.name} is not a regular file"
                elif name.is_absolute() or ".." in name.parts:
                    problem = f"member {info.name} is named outside of the archive"
                stem, _, suffix = name.name.partition(".")
                yield _Member(
                    str(name.with_name(stem or name.name)), f".{suffix}", content, problem
                )
        if any(FileSlice(path, end, min(tarfile.BLOCKSIZE, max(0, size - end))).read()):
            raise tarfile.ReadError(f"the header at byte {end} is damaged")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UserError(
            f"tar file {path} cannot be read: {error}; a compressed one must be decompressed"
        ) from error


def _read_sample(members: list[_Member]) -> tuple[dict[str, Any], str | None]:
    """Return a sample's columns, and its question if its answer is a class or a caption."""
    values: dict[str, Any] = {}
    media: dict[str, list[FileSlice]] = {"images": [], "videos": []}
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for member in members:
        last = PurePosixPath(f"a{member.suffix}").suffix.lower()
        if member.problem is not None:
            raise ValueError(member.problem)
        if member.suffix in seen:
            raise ValueError(f"it has two members {member.suffix}: names must be unique")
        seen.add(member.suffix)
        if last in IMAGE_SUFFIXES or last in VIDEO_SUFFIXES:
            media["images" if last in IMAGE_SUFFIXES else "videos"].append(member.content)
        elif last == ".json" or last in _TEXT_SUFFIXES:
            if member.content.size > MAX_LINE_BYTES:
                raise ValueError(f"its {member.suffix} is longer than {MAX_LINE_BYTES} bytes")
            data = member.content.read()
            if last == ".json":
                values |= parse_object(data)
                continue
            try:
                texts[last[1:]] = data.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"its text is not UTF-8: {error.reason}") from error
    question = None
    if texts and not any(suffix.lower().endswith(".json") for suffix in seen):
        values["answer"] = next(iter(texts.values()))
        question = _CLASS_QUESTION if "cls" in texts else CAPTION_QUESTION
    values = {**texts, **values}
    for name, contents in media.items():
        if contents:
            values.pop(name.removesuffix("s"), None)  # the name that it had elsewhere
            values[name] = contents
    return values, question
