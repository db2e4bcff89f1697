"""Puzzles made of images: what they show, which images are refused, that they can be repeated."""

import io
from collections import Counter
from typing import Any

import dataset_files
import numpy as np
import pytest
from PIL import Image

from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.soundness import check_task
from vlm_grpo.types import Example


def paint(seed: int, width: int = 96, height: int = 90) -> Image.Image:
    """Return a picture of random blocks of 6 pixels."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 6, width // 6, 3), np.uint8)
    return Image.fromarray(blocks.repeat(6, 0).repeat(6, 1))


def load(source: Any, puzzle: str, skips: bool = False, **options: Any) -> list[Example]:
    task = load_task("self_supervised", puzzle=puzzle, **options)
    return dataset_files.load(source, task, on_bad_row="skip" if skips else "error")


def get_pixels(image: Any) -> np.ndarray:
    return np.asarray(image.load())


@pytest.mark.parametrize("joined", [False, True])
def test_the_gold_order_of_a_jigsaw_restores_the_image(joined):
    picture = paint(0)
    rows = [{"id": str(n), "images": [picture.rotate(90 * n, expand=True)]} for n in range(2)]
    for number, example in enumerate(load(rows, "jigsaw", rows=3, columns=2, joined=joined)):
        task: Any = load_task("self_supervised", rows=3, columns=2, joined=joined)
        tiles = [get_pixels(image) for image in example.images]
        if joined:
            halves = (np.split(row, 2, axis=1) for row in np.split(tiles[0], 3))
            tiles = [tile for row in halves for tile in row]
        order = task.gold_answer(example)
        found = [np.hstack([tiles[n - 1] for n in order[y : y + 2]]) for y in (0, 2, 4)]
        whole = np.vstack(found)
        source = np.asarray(rows[number]["images"][0])
        top, left = (source.shape[0] - whole.shape[0]) // 2, (source.shape[1] - whole.shape[1]) // 2
        assert (whole == source[top:, left:][: whole.shape[0], : whole.shape[1]]).all()


def test_rotation_odd_and_order_ask_about_what_they_show():
    rows = [{"id": str(n), "images": [paint(n)]} for n in range(40)]
    for row, example in zip(rows, load(rows, "rotation"), strict=True):
        turned = row["images"][0].rotate(-example.answer["degrees"], expand=True)  # clockwise
        assert (get_pixels(example.images[0]) == np.asarray(turned)).all()
        assert example.images[0].size == turned.size
    for row, example in zip(rows, load(rows, "odd"), strict=True):
        changed = get_pixels(example.images[0]) != np.asarray(row["images"][0])
        places = Counter((y // 30, x // 32) for y, x, _ in zip(*changed.nonzero(), strict=True))
        assert [3 * y + x + 1 for y, x in places] == [example.answer["piece"]]
    for example in load(rows, "order", crops=3, min_side=20):
        widths = [image.box[2] - image.box[0] for image in example.images]  # type: ignore[attr-defined]
        assert [widths[n - 1] for n in example.answer["order"]] == sorted(widths)
    answers = Counter(str(e.answer) for e in load(rows, "rotation"))
    assert len(answers) == 4


def test_crops_are_sorted_by_the_depths_of_the_row():
    boxes, depths = [[0, 0, 30, 30], [40, 0, 80, 40], [0, 40, 40, 90]], [3.5, 0.5, 2.0]
    row = {"images": [paint(1)], "answer": {"boxes": boxes, "depths": depths}}
    (example,) = load([row], "order")
    whole, *crops = example.images
    assert whole.size == (96, 90)
    found = [list(crops[n - 1].box) for n in example.answer["order"]]  # type: ignore[attr-defined]
    assert found == [boxes[1], boxes[2], boxes[0]]
    row["answer"]["depths"] = [2.0, 0.5, 2.05]
    with pytest.raises(UserError, match=r"two of its depths, 2\.0 and 2\.05, are nearly equal"):
        load([row], "order")


def test_a_puzzle_depends_on_the_image_the_row_and_the_seed(tmp_path):
    for number in range(6):
        paint(number).save(tmp_path / f"{number}.png")
    (tmp_path / "copy").mkdir()
    orders = [e.answer["order"] for e in load(str(tmp_path), "jigsaw")]
    assert orders == [e.answer["order"] for e in load(str(tmp_path), "jigsaw")]
    assert orders != [e.answer["order"] for e in load(str(tmp_path), "jigsaw", seed=1)]
    rows = [{"id": f"{n}.png", "images": [paint(n)], "answer": 7} for n in range(6)]
    # The same bytes and ids; PNG encodes them in the same way.
    assert orders == [e.answer["order"] for e in load(rows, "jigsaw")]


def test_images_without_a_clear_answer_are_refused_and_counted(tmp_path, caplog):
    flat = Image.new("RGB", (96, 90), (90, 90, 90))
    again = io.BytesIO()
    gray = paint(0).convert("L")
    gray.resize((192, 180)).save(again, "JPEG", quality=80)
    half = np.asarray(paint(2)).copy()
    half[:30, :64] = 90  # two of the nine tiles
    images = {"good": [gray], "flat": [flat], "again": [again.getvalue()]}
    images |= {"sky": [Image.fromarray(half)], "small": [paint(3, 60, 60)]}
    images["two"] = [paint(4), paint(5)]
    rows = [{"id": name, "images": own} for name, own in images.items()]
    assert [example.id for example in load(rows, "jigsaw", skips=True)] == ["good"]
    assert "skipped 5 bad rows, kept 1" in caplog.text
    with pytest.raises(UserError) as caught:
        load(rows, "jigsaw")
    reasons = ["its parts 1 and 2 look alike", "it repeats example good", "a side of 20 pixels"]
    for text in (*reasons, "a puzzle is made of one image; the row has 2"):
        assert text in str(caught.value)
    turned = np.vstack([np.asarray(paint(6))[:42], np.asarray(paint(6))[:42][::-1, ::-1]])
    with pytest.raises(UserError, match="look alike"):
        load([{"images": [Image.fromarray(turned)]}], "rotation")
    with pytest.raises(UserError, match="every tile looks alike upside down"):
        load([{"images": [flat]}], "odd")
    # Without comparisons, only the sizes matter.
    assert len(load(rows[:4], "jigsaw", min_difference=0)) == 4


def test_finished_puzzles_stay_as_they_are():
    row = {"images": [paint(n) for n in range(3)], "question": "?", "answer": {"order": [2, 1, 3]}}
    (example,) = load([row], "order")
    assert (example.question, len(example.images)) == ("?", 3)
    for order in ([1, 1, 2], [0, 1, 2], [1.0, 2], "12", [1]):
        with pytest.raises(UserError, match="must be the numbers from 1 on"):
            load([{**row, "answer": {"order": order}}], "order")


@pytest.mark.parametrize("puzzle", ["jigsaw", "rotation", "odd", "order"])
def test_every_puzzle_is_sound_and_drawn(puzzle):
    rows = [{"id": f"{n}", "images": [paint(n)]} for n in range(30)]
    task = load_task("self_supervised", puzzle=puzzle, crops=3, min_side=20, tags=True)
    examples = load(rows, puzzle, crops=3, min_side=20)
    assert list(check_task(task, examples))[-1].endswith("is sound on this data")
    example = examples[0]
    image = example.images[0].load()
    drawn = task.draw(image, task.gold_answer(example), example, "#ffb000")
    assert drawn.tobytes() != image.tobytes()
