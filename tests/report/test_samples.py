"""Thumbnails and drawings of the sampled answers."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image
from report_runs import load_few_examples

from vlm_grpo.report import samples
from vlm_grpo.task.drawing import GOLD_COLOR
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import ImageRef


def test_a_drawing_is_the_tasks_own_and_has_both_answers(tmp_path):
    task = load_task("grounding")
    (example,), thumbnails = load_few_examples("grounding", task), samples.ThumbnailStore(tmp_path)
    (x1, y1, x2, y2), *_ = task.gold_answer(example)
    name = thumbnails.add_drawing(task, example, task.gold_answer(example), GOLD_COLOR)
    with Image.open(tmp_path / "images" / str(name)) as image:
        drawn = image.convert("RGBA")
    assert drawn.size == example.images[0].size  # small enough to be kept unchanged
    red, green, blue = (int(GOLD_COLOR[i : i + 2], 16) for i in (1, 3, 5))
    middle = int((x1 + x2) / 2)
    assert drawn.getpixel((middle, int(y1))) == (red, green, blue, 255)
    assert drawn.getpixel((middle, int((y1 + y2) / 2))) == (0, 0, 0, 0)  # only an outline
    both: Any = samples.draw_answers(task, example, ((0.0, 0.0, 9.0, 9.0),))
    colors = {color for _, color in both.getcolors(84 * 84) or ()}
    assert {(255, 176, 0), (220, 38, 127)} <= colors  # GOLD_COLOR and PREDICTED_COLOR
    assert samples.draw_answers(task, example, "no boxes") is None
    assert samples.draw_answers(task, replace(example, images=()), None) is None


def test_an_answer_is_drawn_on_the_image_that_it_refers_to_or_not_at_all(tmp_path):
    (old, new), task = load_few_examples("grounding", load_task("grounding"), 2), load_task("gui")
    small = replace(old.images[0], size=(20, 10))  # never decoded
    example = replace(new, images=(small, *new.images))
    drawn: Any = samples.draw_answers(task, example, None)
    assert drawn.size == new.images[0].size
    name = samples.ThumbnailStore(tmp_path).add_drawing(
        task, example, task.gold_answer(example), "red"
    )
    with Image.open(tmp_path / "images" / str(name)) as image:
        assert image.size == new.images[0].size
    # A task that draws nothing or fails leaves no file.
    (example,) = load_few_examples("ocr", load_task("ocr"))
    thumbnails = samples.ThumbnailStore(tmp_path / "none")
    for task_name, answer in {"ocr": "ABC", "grounding": "no boxes"}.items():
        assert thumbnails.add_drawing(load_task(task_name), example, answer, GOLD_COLOR) is None
    assert list(thumbnails.folder.iterdir()) == []


def test_a_thumbnail_is_small_or_the_exact_image_and_written_once(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), dtype=np.uint8)
    path = tmp_path / "noise.png"
    Image.fromarray(noise).save(path)
    thumbnails = samples.ThumbnailStore(tmp_path)
    ref = ImageRef("noise", (1600, 1200), (1600, 1200), path=path)
    name = thumbnails.add_image(ref)
    kept = thumbnails.folder / str(name)
    assert kept.stat().st_size <= samples.THUMBNAIL_BYTES
    with Image.open(kept) as image:
        assert max(image.size) <= samples.THUMBNAIL_SIDE
    kept.write_bytes(b"as it was")
    assert thumbnails.add_image(ref) == name
    assert kept.read_bytes() == b"as it was"
    assert thumbnails.add_image(replace(ref, path=tmp_path / "missing.png")) is None

    # 84 x 84 pixels are far below the limit: a small image is kept exactly.
    image = load_few_examples("counting", load_task("counting"))[0].images[0].load()
    small = Image.open(io.BytesIO(samples.thumbnail(image))).convert("RGB")
    assert small.tobytes() == image.tobytes()
