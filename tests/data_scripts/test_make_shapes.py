"""Scenes of shapes: the same seed draws the same pixels, and the answers agree with them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.data_scripts.make_shapes import COLORS, draw_examples

DIGEST = """
import hashlib
from vlm_grpo.data_scripts.make_shapes import draw_examples
rows = draw_examples("counting", 5, 3) + draw_examples("grounding", 5, 3)
parts = [row.images[0].data + repr(row.answer).encode() for row in rows]
print(hashlib.sha256(b"".join(parts)).hexdigest())
"""


def ink(image: Image.Image) -> np.ndarray:
    """(height, width) booleans: True where a pixel has any of the shapes' colours."""
    pixels = np.asarray(image)
    return np.any([np.all(pixels == color, axis=-1) for color in COLORS.values()], axis=0)


def kind_of(blob: np.ndarray) -> str:
    """A filled blob's kind by the part of its box that it covers: 1, about π/4, about 1/2."""
    filled = blob.mean()
    return "square" if filled == 1 else "circle" if filled > 0.68 else "triangle"


def blobs(mask: np.ndarray) -> list[np.ndarray]:
    """The connected parts of a mask, each cut to its own box."""
    labels = np.empty(mask.shape, dtype=np.int32)
    ndimage.label(mask, structure=np.ones((3, 3)), output=labels)
    return [labels[part] > 0 for part in ndimage.find_objects(labels)]


@pytest.mark.parametrize("task", make_shapes.TASKS)
def test_example_depends_on_seed_split_and_index_alone(task):
    ten = draw_examples(task, 10, seed=4)
    assert draw_examples(task, 3, seed=4) == ten[:3]
    assert len({row.images[0].data for row in ten}) == 10
    assert draw_examples(task, 3, seed=5) != ten[:3]
    other = draw_examples(task, 3, seed=4, split="eval")
    assert [row.images[0].data for row in other] != [row.images[0].data for row in ten[:3]]


def test_same_pixels_in_another_process():
    rows = draw_examples("counting", 5, 3) + draw_examples("grounding", 5, 3)
    here = b"".join((row.images[0].data or b"") + repr(row.answer).encode() for row in rows)
    there = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == hashlib.sha256(here).hexdigest()


@pytest.mark.parametrize("task", ["counting", "cluttered"])
def test_count_is_what_the_pixels_show(task):
    rows = draw_examples(task, 200, seed=1)
    for row in rows:
        kinds = [kind_of(blob) for blob in blobs(ink(row.images[0].load()))]
        asked = row.question.removeprefix("How many ").removesuffix("s are there?")
        assert kinds.count(asked) == row.answer, row.id
    assert {row.answer for row in rows} == set(range(1, make_shapes.MAX_COUNT + 1))
    has_distractors = any(len(row.meta["shapes"]) > row.answer for row in rows)
    assert has_distractors == (task == "cluttered")


@pytest.mark.parametrize("task", ["grounding", "crowded"])
def test_box_is_tight_and_the_expression_names_one_shape(task):
    for row in draw_examples(task, 200, seed=1):
        color, kind = row.question.removeprefix("the ").split()
        (x1, y1, x2, y2), pixels = row.answer["boxes"][0], np.asarray(row.images[0].load())
        own = np.all(pixels == COLORS[color], axis=-1)
        ys, xs = np.nonzero(own[y1:y2, x1:x2])
        # x2 and y2 are one past the last pixel, so a tight box touches ink on all four sides.
        assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == (0, 0, x2 - x1, y2 - y1), row.id
        kinds = [kind_of(blob) for blob in blobs(own)]
        assert kinds.count(kind) == 1, row.id
        assert row.answer["labels"] == [f"{color} {kind}"]


def test_images_are_84_pixels_square_in_memory():
    image = draw_examples("counting", 1)[0].images[0]
    assert image.size == image.resized_size == image.load().size == (84, 84)
    assert image.path is None


@pytest.mark.parametrize("task", make_shapes.TASKS)
def test_file_form_holds_what_the_memory_form_holds(task, tmp_path):
    out = tmp_path / "new" / "scenes"
    argv = ["--task", task, "--count", "4", "--seed", "2", "--out", str(out)]
    assert make_shapes.main(argv) == 0
    rows = [json.loads(line) for line in (out / f"{task}.jsonl").read_text().splitlines()]
    for row, example in zip(rows, draw_examples(task, 4, seed=2), strict=True):
        assert (row["id"], row["question"], row["answer"]) == (
            example.id,
            example.question,
            example.answer,
        )
        assert (out / row["images"][0]).read_bytes() == example.images[0].data
    assert [path.name for path in out.parent.iterdir()] == ["scenes"], "left-overs beside it"


def test_a_used_folder_is_refused_and_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert make_shapes.main(["--count", "1", "--out", str(tmp_path)]) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_bad_arguments_are_named(tmp_path, capsys):
    with pytest.raises(ValueError, match="'ocr'; choose counting, cluttered, grounding, crowded"):
        draw_examples("ocr", 1)
    assert make_shapes.main(["--count", "0", "--out", str(tmp_path / "x")]) == 1
    assert "count is 0" in capsys.readouterr().err
