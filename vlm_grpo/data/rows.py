"""Conversion of dataset rows to ``Example``.

Three forms are distinguished by their keys: the canonical one (``id, images, question, answer,
meta``), chats (``messages`` or ``conversations``), and tables whose columns have other names.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, NoReturn

from PIL import Image

from vlm_grpo.config.data import Column, SourceSettings
from vlm_grpo.data.boxes import changes_boxes, check_boxes, convert_boxes, holds_boxes, parse_boxes
from vlm_grpo.data.images import IMAGE_SUFFIXES, VIDEO_SUFFIXES, Clip, MediaReader
from vlm_grpo.data.messages import fill_objects, get_box_scale, read_chat, read_question, shorten
from vlm_grpo.errors import nearest
from vlm_grpo.task import Task, write_prompt
from vlm_grpo.types import Example, ImageRef, TableCell
from vlm_grpo.utils.chat import Turn, place_images

_NAMES: dict[Column, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "prompt"),
    "id": ("id",),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "question": ("question", "problem"),
    "answer": ("answer", "solution"),
}
"""Column names of each field, the canonical one first."""

_MEDIA: dict[Column, tuple[str, ...]] = {"images": IMAGE_SUFFIXES, "videos": VIDEO_SUFFIXES}
"""Suffixes of the files in a column of each kind."""
_SIMILAR = 0.8
"""Similarity from which a column's name counts as a misspelling ("imgae", but not "image_id")."""


@dataclass(frozen=True)
class Row:
    """One unchecked row of a source."""

    location: str  # the row's name in messages (``train.jsonl:3``)
    number: int  # position in the source, from 1
    values: Mapping[str, Any] = field(default_factory=dict)  # value of each column
    strict: bool = False  # require an answer in the task's own form
    problem: str | None = None  # why the row could not be parsed; None if it could
    # an example given as the row, which is only checked; None: built from ``values``
    example: Example | None = None
    # width and height of its first image by its annotations; None: not given
    size: tuple[int, int] | None = None
    # by column, a table that reads a cell again, and the row's position in it; None: the source is
    # no such table
    cells: tuple[Mapping[str, Any], int] | None = None
    question: str | None = None  # its question if its values have none; None: it must have one
    in_pixels: bool = False  # its boxes are edges in pixels, whatever the form of the source's


def to_example(row: Row, source: SourceSettings, images: MediaReader, task: Task) -> Example:
    """Convert a row to an example and check it; a ``ValueError`` names the problem of a bad row.

    ``source`` names the columns that differ from the canonical form, and the form of the boxes.
    """
    columns = source.columns
    if row.problem is not None:
        raise ValueError(row.problem)
    if (row.in_pixels or row.example is not None) and changes_boxes(source):
        raise ValueError(
            "its boxes are edges in pixels in any case: remove box_format and box_scale"
        )
    if row.example is not None:
        _check_fields(row.example)
        return select_valid([row.example], task)
    values = dict(row.values)
    fields = _pop_fields(values, columns)
    beside = (*_to_list(fields.get("images")), *map(Clip, _to_list(fields.get("videos"))))
    has_chat, asks = fields.get("messages") is not None, type(task).pose is not Task.pose
    if has_chat:
        if values.get("audios"):
            raise ValueError("it has audios, which are not supported")
        messages, boxes = fields["messages"], None
        if isinstance(objects := values.get("objects"), Mapping) and "bbox" in objects:
            messages, boxes = fill_objects(messages, values.pop("objects"))
            if (scale := get_box_scale(objects)) is not None:
                source = source.model_copy(update={"box_format": "xyxy", "box_scale": scale})
        chat = read_chat(messages, beside, values.pop("system", None))
        question = chat.turns[-1].text.strip()
        answer = fields.get("answer", chat.answer if boxes is None else boxes)
        if answer is None and not asks:
            raise ValueError("it has no answer: a last turn of the assistant, or a column answer")
    else:
        if row.question is not None:
            fields.setdefault("question", row.question)
        for name in ("question", "answer"):
            if name not in fields and not asks:
                _refuse_missing(name, _NAMES[name][0], row.values)
        question, answer = fields.get("question", ""), fields.get("answer")
        if not isinstance(question, str):
            raise ValueError(f"question must be text, not {shorten(question)}")
        chat = read_question(question, beside)
        question = chat.turns[0].text
    if "images" not in fields and not chat.images:
        _refuse_misnamed_images(values)
    refs = _read_images(row, columns, chat.images, images)
    meta = values.pop("meta", None) or {}
    if not isinstance(meta, Mapping):
        raise ValueError(f"meta must be an object, not {shorten(meta)}")
    is_canonical = row.strict and not has_chat and not columns
    candidates = [answer] if is_canonical else get_answer_candidates(answer)
    meta = {**values, **meta}
    name = _get_id(fields.get("id"), row)
    example = Example(name, refs, question, None, meta, row.location, chat.turns[:-1])
    if refs and changes_boxes(source):
        size = task.target_image(example).size
        candidates = [convert_boxes(answer, source, size) for answer in candidates]
        if holds_boxes(meta.get("evidence")):
            boxes = {"boxes": meta["evidence"]}
            meta = {**meta, "evidence": convert_boxes(boxes, source, size)["boxes"]}
            example = replace(example, meta=meta)
    return select_valid([replace(example, answer=answer) for answer in candidates], task)


def _read_images(
    row: Row, columns: Mapping[Column, str], values: Sequence[Any], images: MediaReader
) -> tuple[ImageRef, ...]:
    column = columns.get("images") or next((n for n in _NAMES["images"] if n in row.values), "")
    refs = tuple(
        _read_image(row, column, position, value, images) for position, value in enumerate(values)
    )
    if row.size is not None and refs and refs[0].size != row.size:
        raise ValueError(
            f"image {refs[0].name} has {refs[0].size[0]}x{refs[0].size[1]} pixels, but "
            f"{row.size[0]}x{row.size[1]} by the annotations, whose boxes would be wrong"
        )
    return refs


def _read_image(row: Row, column: str, position: int, value: Any, images: MediaReader) -> ImageRef:
    """Return a reference to an image of a row, to its cell if it is in the row's column."""
    ref = images.read(value, f"{row.location} image {position + 1}")
    tables, index = row.cells or ({}, 0)
    if column not in tables or ref.data is None:
        return ref
    content = row.values.get(column)
    if content is value:
        return replace(ref, data=TableCell(tables[column], index, column))
    if isinstance(content, Sequence) and content[position : position + 1] == [value]:
        return replace(ref, data=TableCell(tables[column], index, column, position))
    return ref


def _check_fields(example: Example) -> None:
    if not isinstance(example.id, str) or not example.id:
        raise ValueError(f"an Example's id must be non-empty text, not {shorten(example.id)}")
    if not isinstance(example.question, str):
        raise ValueError(f"an Example's question must be text, not {shorten(example.question)}")
    if not isinstance(example.meta, Mapping):
        raise ValueError(f"an Example's meta must be a mapping, not {shorten(example.meta)}")
    images = example.images
    if not isinstance(images, tuple | list) or not all(isinstance(i, ImageRef) for i in images):
        raise ValueError(
            "an Example's images must be a tuple of ImageRef: "
            "give rows (mappings) instead for paths and PIL images"
        )
    turns = example.history
    if not isinstance(turns, tuple) or not all(isinstance(turn, Turn) for turn in turns):
        raise ValueError("an Example's history must be a tuple of Turn")


def get_answer_candidates(value: Any) -> list[Any]:
    """Return possible readings of another toolkit's answer, the most literal first.

    They are text without ``<answer>`` tags, an integer, and boxes. The first that passes the
    task's check is used.

    >>> get_answer_candidates("<answer> 3 </answer>")
    ['3', 3]
    >>> get_answer_candidates([1, 2, 3, 4])
    [[1, 2, 3, 4], {'boxes': [[1, 2, 3, 4]]}]
    """
    candidates: list[Any] = [value]
    if isinstance(value, str):
        inner = re.fullmatch(r"\s*<answer>(.*)</answer>\s*", value, re.DOTALL)
        text = (inner[1] if inner else value).strip()
        candidates = [text]
        if re.fullmatch(r"\d{1,18}", text):
            candidates.append(int(text))
        value = _parse_json(text)
    if isinstance(value, float) and value.is_integer():
        candidates.append(int(value))
    boxes = parse_boxes(value)
    if boxes is not None:
        candidates.append(boxes)
    return candidates


def _pop_fields(values: dict[str, Any], columns: Mapping[Column, str]) -> dict[Column, Any]:
    """Remove the fields of a row from its values and return those that it has.

    The chat comes first: the question of a row with a chat is another column.
    """
    fields: dict[Column, Any] = {}
    every = dict(values)
    for name, names in _NAMES.items():
        if name == "question" and fields.get("messages") is not None:
            continue
        present = [candidate for candidate in names if candidate in values]
        if name in columns:
            present = [columns[name]]
            if columns[name] not in values:
                _refuse_missing(name, columns[name], every)
        elif name == "messages":  # TRL's prompt is a chat; elsewhere it is a text
            present = [n for n in present if values[n] is not None]
            present = [n for n in present if n != "prompt" or isinstance(values[n], list)]
        if len(present) > 1:
            raise ValueError(f"it has {' and '.join(present)}: keep one of them")
        if present:
            fields[name] = values.pop(present[0])
    return fields


def _refuse_missing(field: Column, column: str, values: Mapping[str, Any]) -> NoReturn:
    found = list(map(str, values))
    raise ValueError(
        f"it has no {column}{nearest(column, found)}; it has "
        + (f"{', '.join(found)}: set data.columns.{field}=…" if found else "no columns")
    )


def _to_list(media: Any) -> Sequence[Any]:
    if isinstance(media, (str, bytes, Mapping)) or not isinstance(media, Sequence):
        return () if media is None else (media,)
    return media


def _refuse_misnamed_images(values: Mapping[str, Any]) -> None:
    for column, value in values.items():
        for kind, suffixes in _MEDIA.items():
            likeness = max(SequenceMatcher(None, str(column), n).ratio() for n in _NAMES[kind])
            if likeness >= _SIMILAR or _seems_image(value, suffixes):
                raise ValueError(
                    f"it has no {kind}, but a column {column} that seems to hold them: rename it "
                    f"to {kind}, set data.columns.{kind}={column}, or give images: [] for a row "
                    "of text"
                )


def _seems_image(value: Any, suffixes: tuple[str, ...]) -> bool:
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, str):
        return value.lower().endswith(suffixes)
    is_encoded = isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes)
    return is_encoded or isinstance(value, bytes | Image.Image)


def _get_id(value: Any, row: Row) -> str:
    if value is None:
        return f"row-{row.number}"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"id must be non-empty text or an integer, not {shorten(value)}")
    return value


def select_valid(examples: Sequence[Example], task: Task) -> Example:
    """Return the first of several readings of a row whose answer the task accepts.

    ``ValueError``: the task accepts none, in which case the message is that for the first; it
    cannot write the prompt; or the texts have another number of ``<image>`` than images.
    """
    problems: list[ValueError] = []
    turns = *examples[0].history, Turn("user", examples[0].question)
    place_images(turns, len(examples[0].images))
    for row in examples:
        try:
            task.check(example := task.pose(row))
            check_boxes(example, task)
        except ValueError as error:
            problems.append(error)
        except Exception as error:  # a user's check may raise anything
            reason = f"cannot be checked: {type(error).__name__}: {error}"
            problems.append(ValueError(f"the answer {shorten(row.answer)} {reason}"))
        else:
            write_prompt(task, example)
            return example
    raise problems[0]


def _parse_json(text: str) -> Any:
    text = text.removeprefix("```json").removesuffix("```").strip()
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
