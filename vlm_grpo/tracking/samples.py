"""Samples of what a policy writes, with small pictures for people."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_grpo.drawing import GOLD_COLOR, PREDICTED_COLOR
from vlm_grpo.task import Task
from vlm_grpo.types import Example, Group, ImageRef, Score
from vlm_grpo.utils.atomic_io import write_atomic

logger = logging.getLogger(__name__)

HELD_OUT_SHOWN = 128
"""Held-out examples whose answers are kept with a picture at every evaluation."""
THUMBNAIL_SIDE = 448
"""Longest side of a kept picture, in pixels."""
THUMBNAIL_BYTES = 12_000
"""Size of a kept picture's file, so that a report with a thousand of them is below 25 MB."""


class Album:
    """Small pictures for people: ``images/<hash>.webp``, each image once, none over 12 kB.

    Names are hashes, so nothing of the data gets into a path.

    Args:
        folder: the folder that holds ``images``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "images"
        self.folder.mkdir(parents=True, exist_ok=True)

    def picture(self, image: ImageRef) -> str | None:
        """Name of the image's thumbnail; None where the image cannot be decoded any more."""
        try:
            key = image.data or b""
            if image.path is not None:
                key = f"{image.path.resolve()}:{image.path.stat().st_mtime_ns}".encode()
            name = _file_name(key)
            if not (self.folder / name).exists():  # decoding is what takes long
                self._write(name, thumbnail(image.load()))
        except (OSError, ValueError) as error:
            logger.warning("a picture is missing among the samples: %s", error)
            return None
        return name

    def marks(self, task: Task, example: Example, answer: Any, color: str) -> str | None:
        """Name of a transparent picture of what the task draws for an answer.

        Laid over the image's thumbnail it shows the answer on it. None where the task draws
        nothing.
        """
        if answer is None or not example.images:
            return None
        canvas = Image.new("RGBA", example.images[0].size)
        try:
            drawn = task.draw(canvas, answer, example, color).convert("RGBA")
        except Exception:  # a user's drawing may raise anything; the run must go on
            logger.warning("task %s could not draw an answer", type(task).__name__, exc_info=True)
            return None
        if drawn.getbbox() is None:
            return None
        data = thumbnail(drawn)
        return self._write(_file_name(data), data)

    def _write(self, name: str, data: bytes) -> str:
        path = self.folder / name
        if not path.exists():
            write_atomic(path, data)
        return name


def thumbnail(image: Image.Image) -> bytes:
    """The image as WebP of at most 448 pixels a side and 12 kB; lossless where that fits."""
    small = image.copy()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    data = _webp(small, lossless=True, quality=60)
    quality = 80
    while len(data) > THUMBNAIL_BYTES:
        data = _webp(small, quality=quality)
        if quality > 40:
            quality -= 20
        else:  # a noisy image: fewer pixels
            small = small.resize((max(1, small.width * 3 // 4), max(1, small.height * 3 // 4)))
    return data


def _webp(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="WEBP", **options)
    return buffer.getvalue()


def _file_name(key: bytes) -> str:
    return f"{hashlib.sha256(key).hexdigest()[:32]}.webp"


def illustrate(task: Task, example: Example, answer: Any | None) -> Image.Image | None:
    """The example's first image with the gold answer and a predicted one drawn on it.

    None where there is no image, or where it or the drawing fails.
    """
    if not example.images:
        return None
    try:
        image = example.images[0].load()
        if answer is not None:
            image = task.draw(image, answer, example, PREDICTED_COLOR)
        return task.draw(image, task.gold_answer(example), example, GOLD_COLOR)
    except Exception:  # a user's drawing may raise anything; the run must go on
        logger.warning("task %s could not draw an answer", type(task).__name__, exc_info=True)
        return None


def write_samples(
    folder: Path,
    step: int,
    groups: Sequence[Group],
    advantages: Iterable[Sequence[float]],
    task: Task | None = None,
) -> Path:
    """``step-N.jsonl``: a line for each group, with its completions, rewards and advantages.

    Args:
        folder: pictures go to ``images`` in it.
        step: updates that the policy had seen when it wrote these.
        groups: what to write.
        advantages: for each group those of its completions.
        task: draws the answers; None: pictures without drawings.
    """
    album = Album(folder)
    rows = []
    for group, values in zip(groups, advantages, strict=True):
        example = group.prompt.example
        completions = []
        for completion, score, advantage in zip(
            group.completions, group.scores, values, strict=True
        ):
            described = _described(album, task, example, score)
            described |= {"text": completion.text, "stop": completion.stop}
            described |= {"tokens": len(completion.token_ids), "advantage": advantage}
            completions.append(described)
        about = _about(album, task, example)
        rows.append(
            {"step": step, **about, "prompt": group.prompt.text, "completions": completions}
        )
    return _write_rows(folder / f"step-{step:06d}.jsonl", rows)


def write_held_out(
    folder: Path,
    step: int,
    task: Task,
    examples: Sequence[Example],
    rows: Sequence[Mapping[str, Any]],
) -> Path:
    """``held-out-N.jsonl``: the first held-out examples with their answers, as ``write_samples``.

    Args:
        folder: pictures go to ``images`` in it.
        step: updates that the policy had seen.
        task: scored the answers, and draws them.
        examples: the held-out examples, ``seen`` sizes set.
        rows: ``Evaluation.rows``, one for each example.
    """
    album = Album(folder)
    weights = task.reward_weights()
    written = []
    for example, row in list(zip(examples, rows, strict=True))[:HELD_OUT_SHOWN]:
        rewards = row["rewards"]
        unscorable = any(value is None and weights[name] for name, value in rewards.items())
        total = sum(weights[name] * (value or 0.0) for name, value in rewards.items())
        total = None if unscorable else total
        score = Score(row["answer"], row["rewards"], total, row["metrics"])
        described = {"text": row["output"], **_described(album, task, example, score)}
        written.append({"step": step, **_about(album, task, example), "completions": [described]})
    return _write_rows(folder / f"held-out-{step:06d}.jsonl", written)


def _about(album: Album, task: Task | None, example: Example) -> dict[str, Any]:
    """What a line says of its example."""
    gold = None
    if task is not None:
        gold = album.marks(task, example, task.gold_answer(example), GOLD_COLOR)
    return {
        "id": example.id,
        "images": [image.name for image in example.images],
        "pictures": [album.picture(image) for image in example.images],
        "sizes": [image.size for image in example.images],
        "seen": [image.resized_size for image in example.images],
        "question": example.question,
        "gold": example.answer,
        "gold_marks": gold,
        "headline": _primary_metric(task) if task is not None else None,
    }


def _primary_metric(task: Task) -> str | None:
    """The primary metric where each answer has a value of it, and 1 means that the answer is
    right."""
    of_answers = task.primary_metric in {**task.rules("reward"), **task.rules("metric")}
    return task.primary_metric if of_answers and not task.lower_is_better else None


def _described(album: Album, task: Task | None, example: Example, score: Score) -> dict[str, Any]:
    """What a line says of a completion's score."""
    marks = None
    if task is not None:
        marks = album.marks(task, example, score.answer, PREDICTED_COLOR)
    return {
        "answer": score.answer,
        "rewards": dict(score.rewards),
        "reward": score.total,
        "metrics": dict(score.metrics),
        "failures": dict(score.failures),
        "marks": marks,
    }


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    # Half of a surrogate pair, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    write_atomic(path, "".join(lines).encode("utf-8", errors="backslashreplace"))
    return path
