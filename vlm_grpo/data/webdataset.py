"""WebDataset: tar files whose consecutive members with one name are a sample."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from vlm_grpo.data.coco import CAPTION_QUESTION
from vlm_grpo.data.images import IMAGE_SUFFIXES
from vlm_grpo.data.jsonl import MAX_LINE_BYTES, parse_object
from vlm_grpo.data.rows import Row
from vlm_grpo.data.videos import VIDEO_SUFFIXES
from vlm_grpo.errors import UserError
from vlm_grpo.types import FileSlice

_TEXT_SUFFIXES = (".txt", ".cls", ".cap", ".caption", ".text")
_CLASS_QUESTION = "What is in the image?"


@dataclass(frozen=True)
class _Member:
    """A member of a tar file: the sample's key, the rest of the name, and its bytes."""

    key: str
    suffix: str
    content: FileSlice
    problem: str | None = field(default=None)


def read_tar(path: Path) -> Iterator[Row]:
    """Yield a row for each sample of a tar file, without reading its images.

    The object in a sample's ``.json`` holds the columns, and its images are its column ``images``
    (``.jpg``, ``0.png``, …) and its clips its column ``videos``. Its other texts are columns named
    by their suffix; without a ``.json``, one of them is the answer.

    Raises:
        UserError: the file cannot be read, is compressed, or is truncated.
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
                yield _parse_name(info, content)
        if any(FileSlice(path, end, min(tarfile.BLOCKSIZE, max(0, size - end))).read()):
            raise tarfile.ReadError(f"the header at byte {end} is damaged")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UserError(
            f"tar file {path} cannot be read: {error}; a compressed one must be decompressed"
        ) from error


def _parse_name(info: tarfile.TarInfo, content: FileSlice) -> _Member:
    name = PurePosixPath(info.name)
    stem, _, suffix = name.name.partition(".")
    problem = None
    if not info.isreg():
        problem = f"member {info.name} is not a regular file"
    elif name.is_absolute() or ".." in name.parts:
        problem = f"member {info.name} is named outside of the archive"
    return _Member(str(name.with_name(stem or name.name)), f".{suffix}", content, problem)


def _read_sample(members: list[_Member]) -> tuple[dict[str, Any], str | None]:
    """Return a sample's columns, and its question if its answer is a class or a caption."""
    values: dict[str, Any] = {}
    images: list[FileSlice] = []
    videos: list[FileSlice] = []
    texts: dict[str, str] = {}
    seen: set[str] = set()
    has_json = False
    for member in members:
        last = PurePosixPath(f"a{member.suffix}").suffix.lower()
        if member.problem is not None:
            raise ValueError(member.problem)
        if member.suffix in seen:
            raise ValueError(f"it has two members {member.suffix}: names must be unique")
        seen.add(member.suffix)
        if last in IMAGE_SUFFIXES:
            images.append(member.content)
        elif last in VIDEO_SUFFIXES:
            videos.append(member.content)
        elif last == ".json":
            values |= parse_object(_read_text(member))
            has_json = True
        elif last in _TEXT_SUFFIXES:
            texts[last[1:]] = _decode(_read_text(member)).strip()
    values = {**texts, **values}
    question = None
    if not has_json and texts:
        values["answer"] = next(iter(texts.values()))
        question = _CLASS_QUESTION if "cls" in texts else CAPTION_QUESTION
    if images:
        values.pop("image", None)  # the name that the image had elsewhere
        values["images"] = images
    if videos:
        values.pop("video", None)
        values["videos"] = videos
    return values, question


def _read_text(member: _Member) -> bytes:
    if member.content.size > MAX_LINE_BYTES:
        raise ValueError(f"its {member.suffix} is longer than {MAX_LINE_BYTES} bytes")
    return member.content.read()


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"its text is not UTF-8: {error.reason}") from error
