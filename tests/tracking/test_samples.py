"""Thumbnails and drawings of the sampled answers."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from report_runs import few_examples

from vlm_grpo.drawing import GOLD_COLOR
from vlm_grpo.registry import load_task
from vlm_grpo.tracking.samples import (
    THUMBNAIL_BYTES,
    THUMBNAIL_SIDE,
    Album,
    illustrate,
    thumbnail,
)
from vlm_grpo.types import ImageRef


def test_marks_are_the_tasks_drawing(tmp_path: Path) -> None:
    task = load_task("grounding")
    example = few_examples("grounding", task)[0]
    (x1, y1, x2, y2), *_ = task.gold_answer(example)
    name = Album(tmp_path).marks(task, example, task.gold_answer(example), GOLD_COLOR)
    assert name is not None
    with Image.open(tmp_path / "images" / name) as image:
        drawn = image.convert("RGBA")
    assert drawn.size == example.images[0].size  # small enough to be kept as it is
    red, green, blue = (int(GOLD_COLOR[i : i + 2], 16) for i in (1, 3, 5))
    middle = int((x1 + x2) / 2)
    assert drawn.getpixel((middle, int(y1))) == (red, green, blue, 255)
    assert drawn.getpixel((middle, int((y1 + y2) / 2))) == (0, 0, 0, 0)  # only an outline


def test_illustration_has_both_answers() -> None:
    task = load_task("grounding")
    (example,) = few_examples("grounding", task)
    drawn = illustrate(task, example, ((0.0, 0.0, 9.0, 9.0),))
    assert drawn is not None
    colors = {color for _, color in drawn.getcolors(84 * 84) or ()}
    assert {(255, 176, 0), (220, 38, 127)} <= colors  # GOLD_COLOR and PREDICTED_COLOR
    assert illustrate(task, example, "no boxes") is None
    assert illustrate(task, replace(example, images=()), None) is None


def test_task_that_draws_nothing_or_fails(tmp_path: Path) -> None:
    task = load_task("ocr")
    example = few_examples("ocr", task)[0]
    album = Album(tmp_path)
    assert album.marks(task, example, "ABC", GOLD_COLOR) is None
    grounding = load_task("grounding")
    assert album.marks(grounding, example, "no boxes", GOLD_COLOR) is None
    assert list(album.folder.iterdir()) == []


def test_picture_is_decoded_once_and_small(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), dtype=np.uint8)
    path = tmp_path / "noise.png"
    Image.fromarray(noise).save(path)
    album = Album(tmp_path)
    ref = ImageRef("noise", (1600, 1200), (1600, 1200), path=path)
    name = album.picture(ref)
    assert name is not None
    kept = album.folder / name
    assert kept.stat().st_size <= THUMBNAIL_BYTES
    with Image.open(kept) as image:
        assert max(image.size) <= THUMBNAIL_SIDE
    kept.write_bytes(b"as it was")
    assert album.picture(ref) == name
    assert kept.read_bytes() == b"as it was"
    assert album.picture(replace(ref, path=tmp_path / "missing.png")) is None


def test_small_drawing_is_kept_exactly() -> None:
    # An 84×84 picture of shapes is far below the limit, so not one pixel may change.
    image = few_examples("counting", load_task("counting"))[0].images[0].load()
    kept = Image.open(io.BytesIO(thumbnail(image))).convert("RGB")
    assert kept.tobytes() == image.tobytes()
