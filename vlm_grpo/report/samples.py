"""Samples of completions, with thumbnails of images and drawings of answers."""

import hashlib
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from vlm_grpo.task import Task
from vlm_grpo.task.drawing import GOLD_COLOR, PREDICTED_COLOR, draw_boxes
from vlm_grpo.types import EpisodeTurn, Example, Group, ImageRef, Score
from vlm_grpo.utils.atomic_io import write_atomic
from vlm_grpo.utils.chat import THINK_TAGS
from vlm_grpo.utils.jsonl import format_rows

logger = logging.getLogger(__name__)

HELD_OUT_SHOWN = 128  # number of held-out examples that are written with images at every evaluation
THUMBNAIL_SIDE = 448  # longest side of a thumbnail, in pixels
THUMBNAIL_BYTES = 12_000
"""Maximum size of a thumbnail file; a report with a thousand of them stays below 25 MB."""


class ThumbnailStore:
    """Thumbnails in ``images/<hash>.webp``, one per image, of at most 12 kB each.

    Names are hashes, so that no data appears in a path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "images"
        self.folder.mkdir(parents=True, exist_ok=True)

    def add_image(self, image: ImageRef) -> str | None:
        """Write an image's thumbnail and return its name; None if it cannot be decoded."""
        try:
            if image.path is None:
                key = image.read_bytes()
            else:
                key = f"{image.path.resolve()}:{image.path.stat().st_mtime_ns}".encode()
            name = _file_name(key)
            if not (self.folder / name).exists():  # decoding is slow
                self._write(name, thumbnail(image.load()))
        except (OSError, ValueError) as error:
            logger.warning("the samples lack an image: %s", error)
            return None
        return name

    def add_drawing(self, task: Task, example: Example, answer: Any, color: str) -> str | None:
        """Write a transparent overlay with an answer; return its name, None if nothing is drawn."""
        if answer is None or not example.images:
            return None
        canvas = Image.new("RGBA", task.target_image(example).picture_size)
        try:
            drawn = task.draw(canvas, answer, example, color).convert("RGBA")
        except Exception:  # a user's drawing may raise anything; the run must continue
            logger.warning("task %s could not draw an answer", type(task).__name__, exc_info=True)
            return None
        return self.add_overlay(drawn)

    def add_overlay(self, drawn: Image.Image) -> str | None:
        """Write a transparent image and return its name; None: nothing is drawn on it."""
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
    """Return the image as WebP of at most 448 pixels per side and 12 kB; lossless if it fits."""
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
    image.save(buffer := io.BytesIO(), format="WEBP", **options)
    return buffer.getvalue()


def _file_name(key: bytes) -> str:
    return f"{hashlib.sha256(key).hexdigest()[:32]}.webp"


def draw_answers(task: Task, example: Example, answer: Any | None) -> Image.Image | None:
    """Draw the gold answer and a predicted one on a small copy of their image; None: it fails."""
    if not example.images:
        return None
    try:
        image = task.target_image(example).load()
        if answer is not None:
            image = task.draw(image, answer, example, PREDICTED_COLOR)
        image = task.draw(image, task.gold_answer(example), example, GOLD_COLOR).convert("RGB")
    except Exception:  # a user's drawing may raise anything; the run must continue
        logger.warning("task %s could not draw an answer", type(task).__name__, exc_info=True)
        return None
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return image


def build_completion_rows(
    task: Task, step: int, groups: Sequence[Group], advantages: Iterable[Sequence[float]]
) -> list[dict[str, Any]]:
    """Return a row per completion for a tracker's table, with both answers drawn on the image."""
    return [
        {
            "step": step,
            "id": group.prompt.example.id,
            "image": draw_answers(task, group.prompt.example, score.answer),
            "prompt": group.prompt.text,
            "completion": completion.text,
            "gold": str(group.prompt.example.answer),
            **{f"rewards/{name}": value for name, value in score.rewards.items()},
            "reward": score.total,
            "advantage": advantage,
            "tokens": len(completion.token_ids),
            "truncated": completion.stop == "length",
        }
        for group, values in zip(groups, advantages, strict=True)
        for completion, score, advantage in zip(
            group.completions, group.scores, values, strict=True
        )
    ]


def write_samples(
    folder: Path,
    step: int,
    groups: Sequence[Group],
    advantages: Iterable[Sequence[float]],
    task: Task,
    drawn: Sequence[Mapping[str, Image.Image | None]] = (),
) -> Path:
    """Write ``step-N.jsonl``: a line per group, with its completions, rewards and advantages.

    ``drawn`` has further drawings over each group's image, by name.
    """
    thumbnails = ThumbnailStore(folder)
    rows, drawn = [], drawn or [{}] * len(groups)
    for group, values, layers in zip(groups, advantages, drawn, strict=True):
        example, completions = group.prompt.example, []
        scored = zip(group.completions, group.scores, values, strict=True)
        for completion, score, advantage in scored:
            row = _score_fields(thumbnails, task, example, score)
            row |= {"text": completion.text, "stop": completion.stop}
            row |= _turn_fields(thumbnails, task, example, completion.turns)
            row |= {"tokens": len(completion.token_ids), "advantage": advantage}
            row |= {} if completion.variant is None else dict([completion.variant])
            completions.append(row)
        fields = {"step": step, **_example_fields(thumbnails, task, example)}
        if layers := {n: thumbnails.add_overlay(x) for n, x in layers.items() if x is not None}:
            fields["layers"] = layers
        rows.append({**fields, "prompt": group.prompt.text, "completions": completions})
    path = folder / f"step-{step:06d}.jsonl"
    write_atomic(path, format_rows(rows))
    return path


def write_held_out(
    folder: Path, step: int, task: Task, examples: Sequence[Example], rows: Sequence[Any]
) -> None:
    """Write ``held-out-N.jsonl``: the first held-out examples, with ``resized_size`` set, and their
    answers, a row of ``Scored.rows`` for each."""
    thumbnails = ThumbnailStore(folder)
    written = []
    for example, summary in list(zip(examples, rows, strict=True))[:HELD_OUT_SHOWN]:
        row = summary.get("samples", [summary])[0]
        score = task.combine(row["answer"], {**row["metrics"], **row["rewards"]}, {})
        completion = {"text": row["output"], **_score_fields(thumbnails, task, example, score)}
        completion |= _turn_fields(thumbnails, task, example, row.get("turns", ()))
        fields = _example_fields(thumbnails, task, example)
        written.append({"step": step, **fields, "completions": [completion]})
    write_atomic(folder / f"held-out-{step:06d}.jsonl", format_rows(written))


def _example_fields(thumbnails: ThumbnailStore, task: Task, example: Example) -> dict[str, Any]:
    optional = {}
    if example.history:
        optional["history"] = [asdict(turn) for turn in example.history]
    if task.thinking_tags != THINK_TAGS:
        optional["thinking_tags"] = asdict(task.thinking_tags)
    images = example.images
    return {
        "id": example.id,
        "images": [image.name for image in images],
        "pictures": [thumbnails.add_image(image) for image in images],
        "sizes": [image.size for image in images],
        "seen": [image.resized_size for image in images],
        "question": example.question,
        **optional,
        "gold": example.answer,
        "gold_marks": thumbnails.add_drawing(task, example, task.gold_answer(example), GOLD_COLOR),
        "marked": images.index(task.target_image(example)) if images else 0,
        "headline": _get_primary_metric(task, example),
    }


def _turn_fields(
    thumbnails: ThumbnailStore, task: Task, example: Example, turns: Sequence[EpisodeTurn]
) -> dict[str, Any]:
    """Return the turns of an episode, with thumbnails of what was read and the boxes of calls."""
    rows, environment = [], task.resolve(example)[1].environment
    for turn in turns:
        images = () if turn.observed is None else turn.observed.images
        row = {**turn.to_json(), "pictures": [thumbnails.add_image(image) for image in images]}
        if turn.call and environment and (boxes := environment.find_boxes(turn.call, example)):
            canvas = Image.new("RGBA", example.images[0].picture_size)
            row["boxes"] = thumbnails.add_overlay(draw_boxes(canvas, boxes, PREDICTED_COLOR))
        rows.append(row)
    return {"turns": rows} if rows else {}


def _get_primary_metric(task: Task, example: Example) -> str | None:
    """Return the primary metric if it has a value per answer, with 1 for a correct one."""
    source, own = task.resolve(example)
    name = own.primary_metric
    if own.lower_is_better or name not in {**own.rules("reward"), **own.rules("metric")}:
        return None
    return f"{source}/{name}" if source else name


def _score_fields(
    thumbnails: ThumbnailStore, task: Task, example: Example, score: Score
) -> dict[str, Any]:
    return {
        "answer": score.answer,
        "rewards": dict(score.rewards),
        "reward": score.total,
        "metrics": dict(score.metrics),
        "failures": dict(score.failures),
        "marks": thumbnails.add_drawing(task, example, score.answer, PREDICTED_COLOR),
    }
