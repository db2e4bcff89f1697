"""Tests of what the embedded model learns before its tasks."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from vlm_grpo.data_scripts.make_shapes import KINDS, PAIRS, draw_examples
from vlm_grpo.data_scripts.tiny_vlm_lessons import (
    COLUMNS,
    LEAST_AREA,
    Schedule,
    VisionHeads,
    draw_place_questions,
    label_scene,
    train,
)

SCENES = [
    scene.meta["shapes"]
    for kind in ("cluttered", "crowded")
    for scene in draw_examples(kind, 20, 0, "lessons")
]


def label_pixel_by_pixel(shapes):
    """Label a scene by counting the pixels of its boxes: an independent form."""
    names, boxes = torch.zeros(9, 4, dtype=torch.long), torch.zeros(9, 4, 4)
    counts = torch.zeros(9, 3)
    for row in range(6):
        for column in range(6):
            pixels = [(14 * column + x, 14 * row + y) for x in range(14) for y in range(14)]
            areas = [
                sum(x1 <= x < x2 and y1 <= y < y2 for x, y in pixels)
                for x1, y1, x2, y2 in (shape["box"] for shape in shapes)
            ]
            shape = shapes[areas.index(max(areas))]
            if max(areas) >= LEAST_AREA:
                place = row // 2 * 3 + column // 2, row % 2 * 2 + column % 2
                names[place] = 1 + PAIRS.index((shape["kind"], shape["color"]))
                boxes[place] = torch.tensor(shape["box"]) / 84
    for shape in shapes:
        x1, y1, x2, y2 = shape["box"]
        counts[(y1 + y2) // 2 // 28 * 3 + (x1 + x2) // 2 // 28, KINDS.index(shape["kind"])] += 1
    return names, boxes, counts


def test_a_token_names_the_shapes_that_cover_its_parts_and_counts_their_centers():
    for shapes in SCENES:
        names, boxes, counts = label_scene(shapes)
        expected = label_pixel_by_pixel(shapes)
        assert torch.equal(names, expected[0])
        assert torch.equal(boxes[names > 0], expected[1][names > 0])
        assert torch.equal(counts, expected[2])
        assert counts.sum() == len(shapes)


def test_heads_that_are_right_have_no_loss_of_words_and_wrong_ones_have():
    heads = VisionHeads(3 * COLUMNS * 27)
    nn.init.zeros_(heads.letters.weight)
    nn.init.zeros_(heads.letters.bias)
    with torch.no_grad():  # each token passes the scores of its own parts through
        heads.letters.weight[:, : COLUMNS * 27] = 50 * torch.eye(COLUMNS * 27)
    scores = torch.zeros(1, 3 * COLUMNS, 27)
    read = "-AA--AB" + "-" * 20  # a blank separates two equal letters; a repeated part is one
    for part, letter in enumerate(read):
        scores[0, part, "-AB".index(letter)] = 1
    tokens = torch.zeros(1, 3, 3 * COLUMNS * 27)
    tokens[..., : COLUMNS * 27] = scores.view(1, 3, -1)
    assert heads.compute_word_loss(tokens, ["AAB"]).item() == pytest.approx(0, abs=1e-3)
    assert heads.compute_word_loss(tokens, ["AB"]).item() > 1


def test_heads_that_are_right_have_no_loss_of_scenes_and_each_wrong_one_has():
    scenes = draw_examples("crowded", 2, 0, "lessons")
    labels = [label_scene(scene.meta["shapes"]) for scene in scenes]
    names, boxes, counts = (torch.cat(part) for part in zip(*labels, strict=True))
    heads = VisionHeads(18)  # a token's features are the one-hot number of its place
    tokens = torch.eye(18).view(2, 9, 18)
    right = {
        "names": 50 * functional.one_hot(names, 1 + len(PAIRS)).float(),
        "boxes": boxes,
        "counts": counts,
    }
    biases = {}
    for name, values in right.items():
        head = getattr(heads, name)
        head.weight.data, head.bias.data = values.flatten(1).T, torch.zeros_like(head.bias)
        biases[name] = head.bias.data
    assert heads.compute_scene_loss(tokens, scenes).item() == pytest.approx(0, abs=1e-6)
    for bias in biases.values():
        bias[-1] += 100  # a wrong name, box or count
        assert heads.compute_scene_loss(tokens, scenes).item() > 0.1
        bias[-1] -= 100


def test_questions_ask_for_the_cells_of_one_shape_or_of_all():
    scenes = draw_examples("scattered", 40, 0, "places")
    numbers, questions = draw_place_questions(scenes, 60, random.Random(0))
    assert [example.id for example in questions] == [scenes[number].id for number in numbers]
    assert len(set(numbers)) > 20
    orders = set()
    for number, example in enumerate(questions):
        boxes = {f"{s['color']} {s['kind']}": s["box"] for s in example.meta["shapes"]}
        cells = {
            name: str((y1 + y2) // 2 // 28 * 3 + (x1 + x2) // 2 // 28 + 1)
            for name, (x1, y1, x2, y2) in boxes.items()
        }
        if number % 2 == 0:
            name = example.question.removeprefix("Where is the ").removesuffix("?")
            assert example.answer == cells[name]
        else:
            names = example.question.removeprefix("Where are ").removesuffix("?").split(", ")
            assert sorted(names) == sorted(cells)
            assert example.answer == "; ".join(f"{name} {cells[name]}" for name in names)
        orders.add(number % 2 == 0 and name == next(iter(cells)))
    assert orders == {True, False}  # not always the first shape


def test_training_draws_new_examples_and_its_rate_rises_to_the_peak_and_falls_to_zero():
    weight, splits, values = nn.Parameter(torch.tensor(100.0)), [], []

    def compute_loss(split):
        assert weight.grad is None  # no gradient is carried from one step into the next
        splits.append(split)
        values.append(weight.item())
        return weight.sum()

    train([weight], Schedule(steps=20, peak=0.1, warmup=5, stable=3), compute_loss, "sum")
    assert splits == [f"warmup-sum-{step}" for step in range(20)]
    values.append(weight.item())
    # Under a constant gradient AdamW moves by the rate, and decays the weight by 0.01 of it.
    rates = [(b - a) / (1 + 0.01 * b) for a, b in zip(values[1:], values, strict=False)]
    assert rates[:9] == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1, 0.1], abs=1e-4)
    assert rates[8:] == sorted(rates[8:], reverse=True)
    assert 0 < rates[-1] < 0.005
