"""One row of any supported form to an ``Example``.

Three forms are told apart by their keys: the canonical one (``id, images, question, answer,
meta``), VLM-R1's (``image, conversations``), and tables whose columns have other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_grpo.config.run import Column
from vlm_grpo.data.images import ImageReader
from vlm_grpo.task import Task
from vlm_grpo.types import Example

_NAMES: dict[Column, tuple[str, ...]] = {
    "id": ("id",),
    "images": ("images", "image"),
    "question": ("question", "problem"),
    "answer": ("answer", "solution"),
}
"""Names under which a field is looked up, ours first."""

_REC_PREFIX = "Please provide the bounding box coordinate of the region this sentence describes:"
"""VLM-R1's grounding question around the expression; here the task words the question."""


@dataclass(frozen=True)
class Row:
    """One row as read, before any check of its contents.

    Attributes:
        location: the row's name in messages (``train.jsonl:3``).
        number: its place in the source, from 1.
        values: its columns.
        strict: its answer must have the task's own form, and it must have an id.
        problem: why the row could not be read at all; None where it could.
    """

    location: str
    number: int
    values: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    problem: str | None = None


def to_example(row: Row, columns: Mapping[Column, str], images: ImageReader, task: Task) -> Example:
    """The row as a checked example.

    Args:
        row: the row as read.
        columns: names of the row's columns where they differ from ours.
        images: reads the images' headers.
        task: says whether the answer has the right form.

    Raises:
        ValueError: what is wrong with the row.
    """
    if row.problem is not None:
        raise ValueError(row.problem)
    values = dict(row.values)
    conversation = "conversations" in values
    if conversation:
        question, answer = _turns(values.pop("conversations"))
    else:
        question, answer = _take(values, "question", columns), _take(values, "answer", columns)
    identity = _identity(_take(values, "id", columns, default=None), row, conversation)
    pictures = _take(values, "images", columns, default=())
    if not isinstance(question, str):
        raise ValueError(f"question must be text, not {_short(question)}")
    meta = values.pop("meta", None) or {}
    if not isinstance(meta, Mapping):
        raise ValueError(f"meta must be an object, not {_short(meta)}")
    if isinstance(pictures, (str, bytes, Mapping)) or not isinstance(pictures, Sequence):
        pictures = () if pictures is None else (pictures,)
    refs = tuple(
        images.read(value, f"{row.location} image {number}")
        for number, value in enumerate(pictures, start=1)
    )
    exact = row.strict and not conversation and not columns
    candidates = [answer] if exact else answer_candidates(answer)
    return first_valid(
        [Example(identity, refs, question, c, {**values, **meta}) for c in candidates], task
    )


def answer_candidates(value: Any) -> list[Any]:
    """Forms that a foreign dataset's answer may stand for, most literal first.

    The task's check picks the first that it accepts: text without ``<answer>`` tags, a whole
    number, boxes.

    >>> answer_candidates("<answer> 3 </answer>")
    ['3', 3]
    >>> answer_candidates([1, 2, 3, 4])
    [[1, 2, 3, 4], {'boxes': [[1, 2, 3, 4]]}]
    """
    found: list[Any] = [value]
    if isinstance(value, str):
        inner = re.fullmatch(r"\s*<answer>(.*)</answer>\s*", value, re.DOTALL)
        text = (inner[1] if inner else value).strip()
        found = [text]
        if re.fullmatch(r"\d{1,18}", text):
            found.append(int(text))
        value = _json_or_none(text)
    if isinstance(value, float) and value.is_integer():
        found.append(int(value))
    boxes = _boxes(value)
    if boxes is not None:
        found.append(boxes)
    return found


def _turns(conversation: Any) -> tuple[str, Any]:
    """Question and answer of VLM-R1's ``conversations``."""
    roles = ("human", "gpt")
    if (
        not isinstance(conversation, list)
        or len(conversation) != 2
        or not all(isinstance(turn, Mapping) and "value" in turn for turn in conversation)
        or tuple(turn.get("from") for turn in conversation) != roles
    ):
        raise ValueError("conversations must be one turn from human and one from gpt")
    question, answer = (turn["value"] for turn in conversation)
    if not isinstance(question, str):
        raise ValueError(f"the human turn must be text, not {_short(question)}")
    question = question.replace("<image>", "").strip()
    return question.removeprefix(_REC_PREFIX).strip(), answer


def _take(
    values: dict[str, Any], name: Column, columns: Mapping[Column, str], default: Any = ...
) -> Any:
    """Remove a field from the row's values, under its own or a mapped name."""
    names = (columns[name],) if name in columns else _NAMES[name]
    present = [candidate for candidate in names if candidate in values]
    if len(present) > 1:
        raise ValueError(f"it has {' and '.join(present)}, of which one is wanted")
    if present:
        return values.pop(present[0])
    if default is ... or name in columns:
        raise ValueError(f"it has no {names[0]}; it has {', '.join(values) or 'no columns'}")
    return default


def _identity(value: Any, row: Row, conversation: bool) -> str:
    if value is None and (conversation or not row.strict):
        return f"row-{row.number}"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"id must be text that is not empty, or a whole number, not {value!r}")
    return value


def first_valid(examples: Sequence[Example], task: Task) -> Example:
    """The first of some readings of a row whose answer the task accepts.

    Raises:
        ValueError: it accepts none; the reason is that of the first.
    """
    problems = []
    for example in examples:
        try:
            task.check(example)
        except ValueError as error:
            problems.append(str(error))
        except Exception as error:  # a user's check may raise anything on an odd answer
            problems.append(
                f"the answer {_short(example.answer)} cannot be checked: "
                f"{type(error).__name__}: {error}"
            )
        else:
            return example
    raise ValueError(problems[0])


def _boxes(value: Any) -> dict[str, Any] | None:
    """The task form of one box, a list of boxes, or a list of labelled boxes; else None."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(item, Mapping) and "bbox_2d" in item for item in value):
        boxes = {"boxes": [item["bbox_2d"] for item in value]}
        if all("label" in item for item in value):
            return {**boxes, "labels": [item["label"] for item in value]}
        return boxes
    if len(value) == 4 and all(isinstance(item, (int, float)) for item in value):
        return {"boxes": [list(value)]}
    if all(isinstance(item, (list, tuple)) and len(item) == 4 for item in value):
        return {"boxes": [list(item) for item in value]}
    return None


def _json_or_none(text: str) -> Any:
    text = text.removeprefix("```json").removesuffix("```").strip()
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
