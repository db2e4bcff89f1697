"""Tests of the shape scenes: reproducible pixels, and answers that match them."""

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
from vlm_grpo.data_scripts.make_shapes import COLORS, RELATIONS, draw_examples
from vlm_grpo.errors import UserError

DIGEST = """
import hashlib
from vlm_grpo.data_scripts.make_shapes import draw_examples
rows = draw_examples("counting", 5, 3) + draw_examples("grounding", 5, 3)
parts = [row.images[0].read_bytes() + repr(row.answer).encode() for row in rows]
print(hashlib.sha256(b"".join(parts)).hexdigest())
"""


def find_shapes(image: Image.Image) -> np.ndarray:
    """(height, width) booleans: True where a pixel has the color of a shape."""
    pixels = np.asarray(image)
    return np.any([np.all(pixels == color, axis=-1) for color in COLORS.values()], axis=0)


def classify(mask: np.ndarray) -> str:
    """Return a shape's kind by the share of its box that it covers: 1, about π/4, about 1/2."""
    share = mask.mean()
    return "square" if share == 1 else "circle" if share > 0.68 else "triangle"


def split_shapes(mask: np.ndarray) -> list[np.ndarray]:
    """Return the connected components of a mask, each cropped to its box."""
    labels = np.empty(mask.shape, dtype=np.int32)
    ndimage.label(mask, structure=np.ones((3, 3)), output=labels)
    return [labels[part] > 0 for part in ndimage.find_objects(labels)]


RECORDED = {
    "counting": "9c3c933de746ab70",
    "cluttered": "86cdc55bed639260",
    "grounding": "1b666cd1b84bf784",
    "crowded": "71569a9980a2043a",
}
"""Digests of 100 examples of each kind, of seed 1, drawn before there were dials."""


@pytest.mark.parametrize("task", RECORDED)
def test_the_scenes_of_the_recipes_stay_the_same(task):
    digest = hashlib.sha256()
    for row in draw_examples(task, 100, seed=1):
        answer = repr((row.id, row.question, row.answer, row.meta))
        digest.update(row.images[0].load().tobytes() + answer.encode())
    assert digest.hexdigest()[:16] == RECORDED[task]


@pytest.mark.parametrize("task", draw_examples.kinds)
def test_an_example_depends_on_seed_split_and_index_only(task):
    ten = draw_examples(task, 10, seed=4)
    assert draw_examples(task, 3, seed=4) == ten[:3]
    assert len({row.images[0].data for row in ten}) == 10
    assert draw_examples(task, 3, seed=5) != ten[:3]
    other = draw_examples(task, 3, seed=4, split="eval")
    assert [row.images[0].data for row in other] != [row.images[0].data for row in ten[:3]]


def test_another_process_draws_the_same_pixels():
    rows = draw_examples("counting", 5, 3) + draw_examples("grounding", 5, 3)
    here = b"".join(row.images[0].read_bytes() + repr(row.answer).encode() for row in rows)
    there = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == hashlib.sha256(here).hexdigest()


@pytest.mark.parametrize("task", ["counting", "cluttered"])
def test_the_count_matches_the_pixels(task):
    rows = draw_examples(task, 200, seed=1)
    for row in rows:
        kinds = [classify(shape) for shape in split_shapes(find_shapes(row.images[0].load()))]
        target = row.question.removeprefix("How many ").removesuffix("s are there?")
        assert kinds.count(target) == row.answer, row.id
    assert {row.answer for row in rows} == set(range(1, make_shapes.MAX_COUNT + 1))
    has_distractors = any(len(row.meta["shapes"]) > row.answer for row in rows)
    assert has_distractors == (task == "cluttered")


@pytest.mark.parametrize("task", ["grounding", "crowded", "scattered"])
def test_the_box_is_tight_and_the_expression_is_unique(task):
    for row in draw_examples(task, 200, seed=1):
        color, kind = row.question.removeprefix("the ").split()
        (x1, y1, x2, y2), pixels = row.answer["boxes"][0], np.asarray(row.images[0].load())
        same_color = np.all(pixels == COLORS[color], axis=-1)
        ys, xs = np.nonzero(same_color[y1:y2, x1:x2])
        # x2 and y2 are one past the last pixel, so a tight box touches the shape on all four sides.
        assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == (0, 0, x2 - x1, y2 - y1), row.id
        kinds = [classify(shape) for shape in split_shapes(same_color)]
        assert kinds.count(kind) == 1, row.id
        assert row.answer["labels"] == [f"{color} {kind}"]


def test_images_are_84_pixels_square_in_memory():
    image = draw_examples("counting", 1)[0].images[0]
    assert image.size == image.resized_size == image.load().size == (84, 84)
    assert image.path is None


@pytest.mark.parametrize("task", draw_examples.kinds)
def test_files_hold_the_same_examples_as_memory(task, tmp_path):
    out = tmp_path / "new" / "scenes"
    argv = ["--task", task, "--count", "4", "--seed", "2", "--out", str(out)]
    assert draw_examples.main(argv) == 0
    rows = [json.loads(line) for line in (out / f"{task}.jsonl").read_text().splitlines()]
    for row, example in zip(rows, draw_examples(task, 4, seed=2), strict=True):
        assert (row["id"], row["question"], row["answer"]) == (
            example.id,
            example.question,
            example.answer,
        )
        assert (out / row["images"][0]).read_bytes() == example.images[0].data
    assert [path.name for path in out.parent.iterdir()] == ["scenes"], "no temporary folder is left"


def test_a_folder_in_use_is_an_error_and_is_not_changed(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert draw_examples.main(["--count", "1", "--out", str(tmp_path)]) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_bad_arguments_are_errors(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"'ocr': choose counting, cluttered, .*, choices$"):
        draw_examples("ocr", 1)
    assert draw_examples.main(["--count", "0", "--out", str(tmp_path / "x")]) == 1
    assert "count is 0" in capsys.readouterr().err


def describe_attributes(row) -> set[tuple[str, ...]]:
    """Return (color, kind) of a question "How many red circles are there?"."""
    color, kinds = row.question.removeprefix("How many ").removesuffix(" are there?").split()
    return {(color, kinds.removesuffix("s"))}


def describe_relations(row) -> set[tuple[str, ...]]:
    """Return (relation, color) next to the named shape: "the shape left of the red square"."""
    relation, _, reference = row.question.removeprefix("the shape ").rpartition(" the ")
    return {(relation.rpartition("the shape ")[2], reference.split()[0])}


def describe_choices(row) -> set[tuple[str, ...]]:
    """Return (color, kind) of the shape that a question "What color is the circle?" means."""
    asked = row.question.removesuffix("?").split()[-1]
    return {tuple(sorted((asked, row.answer["answer"]), key=tuple(COLORS).__contains__))[::-1]}


@pytest.mark.parametrize(
    ("world", "describe", "share"),
    [
        ("attributes", describe_attributes, 3 / 12),
        ("attributes:hard", describe_attributes, 3 / 12),
        ("relations", describe_relations, 4 / 16),
        ("relations:hard,depth=2", describe_relations, 4 / 16),
        ("choices", describe_choices, 3 / 12),
    ],
)
def test_training_has_every_attribute_but_no_composition_of_the_evaluation(world, describe, share):
    train, other = (
        {part for row in draw_examples(world, 500, 1, split) for part in describe(row)}
        for split in ("train", "eval")
    )
    assert not train & other
    assert len(other) / len(train | other) == share
    for place in range(2):
        assert {part[place] for part in train} >= {part[place] for part in other}
    same = draw_examples(
        world + (":" if ":" not in world else ",") + "held_out=false", 200, 1, "eval"
    )
    assert {part for row in same for part in describe(row)} <= train


@pytest.mark.parametrize("split", ["train", "eval"])
def test_one_option_alone_is_the_color_or_the_kind(split):
    rows = draw_examples("choices:hard,occlusion=0,noise=0,clutter=0", 100, 1, split)
    for row in rows:
        pixels = np.asarray(row.images[0].load())
        asked = row.question.removesuffix("?").split()[-1]
        found = [
            answer
            for color in COLORS
            for shape in split_shapes(np.all(pixels == COLORS[color], axis=-1))
            for kind, answer in [(classify(shape), color), (color, classify(shape))]
            if kind == asked
        ]
        assert found == [row.answer["answer"]], row.id
        assert len(row.answer["options"]) == (4 if asked in ("circle", "square", "triangle") else 3)


def test_training_scenes_contain_no_held_out_pair():
    scenes = {
        split: {
            (shape["color"], shape["kind"])
            for row in draw_examples("attributes:hard", 300, 1, split)
            for shape in row.meta["shapes"]
        }
        for split in ("train", "eval")
    }
    new = {
        ("red", "circle"),
        ("blue", "triangle"),
        ("yellow", "square"),
    }  # (first + second) % 4 = 0
    assert (len(scenes["train"]), scenes["train"] & new) == (9, set())
    assert new < scenes["eval"]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_count_of_a_color_and_kind_matches_the_pixels(split):
    rows = draw_examples("attributes:hard,occlusion=0,noise=0,clutter=0", 150, 1, split)
    for row in rows:
        ((color, kind),) = describe_attributes(row)
        same_color = np.all(np.asarray(row.images[0].load()) == COLORS[color], axis=-1)
        found = [classify(shape) for shape in split_shapes(same_color)]
        assert found.count(kind) == row.answer, row.id
    assert {row.answer for row in rows} == set(range(1, make_shapes.MAX_COUNT + 1))


@pytest.mark.parametrize("dials", ["easy", "hard,occlusion=0", "depth=2,distractors=2,size=16"])
def test_one_shape_alone_fits_the_relation(dials):
    for row in draw_examples(f"relations:{dials}", 150, 1, "eval"):
        boxes = {f"{s['color']} {s['kind']}": s["box"] for s in row.meta["shapes"]}
        *relations, reference = row.question.split(" the ")
        start = boxes[reference]
        for relation in reversed(" the ".join(relations).split("the shape ")[1:]):
            name = relation.removesuffix(" the ").strip()
            dx, dy = RELATIONS[name]
            fitting = []
            for box in boxes.values():
                # Twice the offsets of the centers, along the direction and across it.
                right, down = (box[i] + box[i + 2] - start[i] - start[i + 2] for i in (0, 1))
                if right * dx + down * dy > abs(right * dy + down * dx):
                    fitting.append(box)
            assert len(fitting) == 1, row.id
            (start,) = fitting
        assert row.answer["boxes"] == [list(start)]


def test_a_box_is_that_of_the_visible_part():
    for row in draw_examples("relations:occlusion=0.5,clutter=0", 60, 1):
        pixels = np.asarray(row.images[0].load())
        for shape in row.meta["shapes"]:
            x1, y1, x2, y2 = shape["box"]
            ys, xs = np.nonzero(np.all(pixels[y1:y2, x1:x2] == COLORS[shape["color"]], axis=-1))
            assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == (0, 0, x2 - x1, y2 - y1)


def measure_scene(row) -> dict[str, float]:
    """Return numbers of a scene that its dials change, each rising with its dial."""
    pixels = np.asarray(row.images[0].load(), dtype=float)
    gray = pixels.mean(axis=-1)
    colored = np.ptp(pixels, axis=-1) > 6  # noise, strokes and patches are gray
    sides = [max(s["box"][2] - s["box"][0], s["box"][3] - s["box"][1]) for s in row.meta["shapes"]]
    return {
        "noise": gray[~colored].std(),
        "clutter": (abs(gray - np.median(gray))[~colored] > 20).sum(),
        "occlusion": (abs(gray - np.median(gray))[~colored] > 20).sum(),
        "contrast": np.ptp(pixels, axis=-1).max(),
        "distractors": len(sides),
        "size": min(sides),
        "spread": max(sides) - min(sides),
    }


@pytest.mark.parametrize("world", draw_examples.worlds)
@pytest.mark.parametrize(
    ("dial", "low", "high"),
    [
        ("noise", 0, 40),
        ("clutter", 0, 10),
        ("occlusion", 0, 0.5),
        ("contrast", 0.3, 1),
        ("distractors", 0, 4),
        ("size", 8, 14),
        ("spread", 0, 10),
    ],
)
def test_a_dial_changes_what_it_names(world, dial, low, high):
    plain = "size=12,spread=4,distractors=1,noise=0,clutter=0,occlusion=0"
    means = [
        np.mean([measure_scene(r)[dial] for r in draw_examples(f"{world}:{plain},{dial}={v}", 40)])
        for v in (low, high)
    ]
    assert means[1] > 1.2 * means[0]


@pytest.mark.parametrize("world", draw_examples.worlds)
def test_the_levels_get_harder(world):
    easy, medium, hard = (
        draw_examples.worlds[world].read(world, name).model_dump()
        for name in ("easy", "medium", "hard")
    )
    assert easy["size"] > medium["size"] > hard["size"]
    for dial in ("distractors", "noise", "clutter", "occlusion"):
        assert easy[dial] <= medium[dial] <= hard[dial]


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ("relations:oclusion=0.3", r"unknown key oclusion \(did you mean occlusion\?\)\nLevels: "),
        ("relations:occlusion=2", 'occlusion="2" should be less than or equal to 0.6'),
        ("relations:hrad", "relations:hrad: .*\n.*key hrad.*\nLevels: easy, medium, hard; dials: "),
        ("relations:easy,hard", "unknown key hard"),
        ("relations:noise=", 'noise="" should be a whole number'),
        ("attributes:size=30", "shapes of 30 to 34 pixels do not fit into a scene of 84×84: lower"),
    ],
)
def test_wrong_dials_are_one_clear_error(dials, message):
    with pytest.raises(UserError, match=message):
        draw_examples(dials, 1)


def test_kinds_without_dials_refuse_them():
    with pytest.raises(
        UserError, match="counting has no dials, as in counting:hard; those of attr"
    ):
        draw_examples("counting:hard", 1)
