"""Readers of published formats (JSON, JSON Lines, pickles, tables, COCO), and common rows.

A file that is missing, truncated or malformed raises ``UserError`` with the file's name.
"""

from __future__ import annotations

import csv
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NoReturn

from vlm_grpo.data.detection import Coco, parse_coco
from vlm_grpo.data.files import read_csv, read_jsonl
from vlm_grpo.data.rows import get_answer_candidates
from vlm_grpo.data_scripts.converter import ConvertedRow, Image, RawRecord, RefusedRow, Request
from vlm_grpo.errors import UserError
from vlm_grpo.tasks.math import read_answer


def read_text(path: Path, encoding: str = "utf-8-sig") -> str:
    """Return the text of a file, without a byte order mark."""
    try:
        return path.read_text(encoding=encoding)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is corrupt: it is not {encoding} text ({error.reason})") from error


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return parse_json(read_text(path), path)


def parse_json(text: str, path: Path) -> Any:
    """Return the value in a file's text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is corrupt or truncated: {error}") from error


def read_json_rows(path: Path) -> Iterator[RawRecord]:
    """Yield the objects of a JSON Lines file, or of a JSON file that holds one list of objects."""
    with path.open("rb") as file:
        is_list = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if is_list:
        yield from read_json(path)
        return
    for row in read_jsonl(path):
        if row.problem is not None:
            raise UserError(f"{path} is corrupt or truncated: {row.location}: {row.problem}")
        yield dict(row.values)


def read_data(path: Path) -> list[RawRecord]:
    return read_json(path)["data"]


def read_rows(
    request: Request,
    columns: Sequence[str],
    locate: Callable[[RawRecord], str | None],
    read_file: Callable[[Path], Iterable[RawRecord]] = read_json_rows,
) -> Iterator[tuple[RawRecord, Image]]:
    """Yield the rows of a JSON file or of a table, each with its image.

    A table must have ``image`` and the ``columns``; ``locate`` returns the path of the image of a
    file's row.
    """
    if request.source.endswith((".json", ".jsonl")):
        for row in read_file(request.path):
            yield row, locate(row)
    else:
        split = {"val": "validation"}.get(request.split, request.split)
        for row in replace(request, split=split).read_table("image", *columns):
            yield row, row["image"]


class _DataUnpickler(pickle.Unpickler):
    """An unpickler of dicts, lists, strings and numbers that refuses any reference to code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}; only plain data is allowed")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to data outside the file")


def read_table_with_images(path: Path) -> Iterator[RawRecord]:
    """Yield the rows of a text table whose cells may hold images."""
    limit = csv.field_size_limit(sys.maxsize)  # of the whole process
    try:
        for line in read_csv(path):
            if line.problem is not None:
                raise UserError(f"{line.location}: {line.problem}")
            yield line.values
    finally:
        csv.field_size_limit(limit)


def read_pickle(path: Path) -> Any:
    """Return the value of a pickle of plain containers, without running any code in it."""
    try:
        with path.open("rb") as file:
            # Python 2 wrote the published files; UTF-8 reads its byte strings as text.
            return _DataUnpickler(file, encoding="utf-8").load()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(
            f"{path} is corrupt, truncated or not a pickle of plain data: {error}"
        ) from error


def read_coco(path: Path) -> Coco:
    """Read a COCO annotation file of boxes."""
    content = read_json(path)
    if missing := [n for n in ("images", "annotations", "categories") if n not in content]:
        raise UserError(f"{path} is not a COCO annotation file: it has no {', '.join(missing)}")
    return parse_coco(path, content)


def group_regions(coco: Coco) -> dict[int, list[RawRecord]]:
    """Return the annotations of every image, an empty list for an image without any."""
    groups: dict[int, list[RawRecord]] = {image: [] for image in coco.images}
    for annotation in coco.annotations:
        groups[annotation["image_id"]].append(annotation)
    return groups


def label_regions(coco: Coco, regions: Sequence[RawRecord]) -> dict[str, list]:
    """Return the boxes and labels of some annotations, as an answer."""
    return {
        "boxes": [xywh_to_xyxy(region["bbox"]) for region in regions],
        "labels": [coco.categories[region["category_id"]]["name"] for region in regions],
    }


def refuse_incomplete(name: str, found: int, expected: int) -> Iterator[RefusedRow]:
    """Yield a refused row if a list or folder of images does not have the published number."""
    if found != expected:
        reason = "not the published number of images"
        yield RefusedRow(name, reason, f"{found:,} instead of {expected:,}", kind="source")


def xywh_to_xyxy(box: Sequence[float]) -> list[float]:
    """Convert a box from COCO's x, y, width, height to x1, y1, x2, y2.

    >>> xywh_to_xyxy([10, 20, 5.5, 4])
    [10, 20, 15.5, 24]
    """
    x, y, width, height = box
    return [x, y, x + width, y + height]


def clean_mask(segmentation: Any) -> Any:
    """Return an annotation's mask without polygons of fewer than three points, which some have."""
    if isinstance(segmentation, Mapping):
        return segmentation
    return [polygon for polygon in segmentation if len(polygon) >= 6]


def enclosing_box(boxes: Sequence[Sequence[float]]) -> list[float]:
    """Return the smallest xyxy box that contains all boxes.

    >>> enclosing_box([[0, 5, 2, 6], [1, 1, 3, 2]])
    [0, 1, 3, 6]
    """
    left, top, right, bottom = zip(*boxes, strict=True)
    return [min(left), min(top), max(right), max(bottom)]


def locate_phrase(
    name: str, image: Image, phrase: str, box: list[float], meta: Mapping[str, Any]
) -> ConvertedRow:
    """Build the row of a phrase that refers to one box."""
    return ConvertedRow(name, (image,), phrase, {"boxes": [box], "labels": [phrase]}, meta)


def accept_texts(
    name: str, image: Image, row: RawRecord, meta: Mapping[str, Any]
) -> ConvertedRow | RefusedRow:
    """Build the row of a question with several accepted answers, the empty ones left out."""
    answers = [answer for answer in row.get("answers") or [] if answer.strip()]
    if not answers:
        return RefusedRow(name, "it has no answers")
    return ConvertedRow(name, (image,), row["question"], answers, meta)


def pose_problem(
    name: str, images: Sequence[Image], question: str, answer: str, meta: Mapping[str, Any]
) -> ConvertedRow | RefusedRow:
    """Build the row of a problem for the task ``math``; a gold answer of several parts is left out.

    ``<image>``, which marks the place of the image in the question, is removed.
    """
    if read_answer(answer) is None:
        reason = "its answer is not one formula"
        return RefusedRow(name, reason, f"{answer!r:.80}", kind="excluded")
    return ConvertedRow(name, tuple(images), question.replace("<image>", "").strip(), answer, meta)


def list_texts(answers: Any) -> list[str]:
    """Return one answer, or a list of them, as texts."""
    return [str(answer) for answer in (answers if isinstance(answers, list) else [answers])]


def remove_letter(option: str) -> str:
    """Return the text of an option without the letter before it: "B. left" is "left"."""
    return re.sub(r"\A[A-Z][.)] *", "", option)


def to_choice(options: Sequence[Any], letter: str) -> dict[str, Any]:
    """Return the answer for the task choice to a question whose right option has a letter.

    >>> to_choice(["cat", "dog"], "(B)")
    {'options': ['cat', 'dog'], 'answer': 'dog'}
    """
    texts = [str(option) for option in options]
    return {"options": texts, "answer": texts[ascii_uppercase.index(letter.strip("() "))]}


def parse_foreign_answer(value: Any, task: str) -> Any | None:
    """Convert a foreign answer to the task's form, or return None if it cannot be read as one."""
    types = {"grounding": dict, "detection": dict, "counting": int, "ocr": (str, list)}
    candidates = get_answer_candidates(value)
    return next((answer for answer in candidates if isinstance(answer, types[task])), None)
