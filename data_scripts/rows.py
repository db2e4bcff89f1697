"""The rows that converters yield: converted, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, Literal

from vlm_grpo.tasks.math import read_answer

RawRecord = dict[str, Any]
"""One row, annotation or entry in the form of its source."""
Image = str | bytes | None
"""A path relative to the image folder, encoded image bytes, or None if the source has no image."""


@dataclass(frozen=True)
class ConvertedRow:
    """One row of the output.

    Attributes:
        id: unique within the output.
        images: the images.
        question: as in ``Example``.
        answer: in the task's form; boxes are xyxy in pixels.
        meta: fields to group scores by, and other fields worth keeping.
        videos: paths of its videos in the image folder.
    """

    id: str
    images: tuple[Image, ...]
    question: str
    answer: Any
    meta: Mapping[str, Any] = field(default_factory=dict)
    videos: tuple[str, ...] = ()


@dataclass(frozen=True)
class RefusedRow:
    """A row of the source that is not converted.

    Attributes:
        id: identifies the row.
        reason: category of the problem; the summary counts rows by it.
        detail: details of this row's problem.
        kind: "lost": it should have been converted; "excluded": the converter leaves out such
            rows by definition; "source": it stands for a defect of the source, and is no row.
    """

    id: str
    reason: str
    detail: str = ""
    kind: Literal["lost", "excluded", "source"] = "lost"


Rows = Iterator[ConvertedRow | RefusedRow]
"""A converter's rows, one for each row of the source."""


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


def to_choice(options: Sequence[Any], letter: str) -> dict[str, Any]:
    """Return the answer for the task choice to a question whose right option has a letter.

    >>> to_choice(["cat", "dog"], "(B)")
    {'options': ['cat', 'dog'], 'answer': 'dog'}
    """
    texts = [str(option) for option in options]
    return {"options": texts, "answer": texts[ascii_uppercase.index(letter.strip("() "))]}
