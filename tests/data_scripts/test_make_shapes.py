"""Tests of the shape scenes: reproducible pixels, and answers that match them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.data_scripts.make_shapes import COLORS, RELATIONS, draw_examples


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
