"""Tests of the drawn screens: one button fits the question, and its box is that of the pixels."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_grpo.data_scripts.make_screens import draw_examples
from vlm_grpo.data_scripts.make_shapes import COLORS, SIDE


def read_question(row) -> tuple[str, str]:
    color, kind = row.question.removeprefix("click the ").split()
    return color, kind


@pytest.mark.parametrize("dials", ["easy", "medium", "hard,noise=0", "columns=4,rows=3"])
def test_one_button_fits_and_holds_its_icon(dials):
    for row in draw_examples(f"screens:{dials}", 100, 1, "eval"):
        color, kind = read_question(row)
        elements = row.meta["elements"]
        assert [(e["color"], e["kind"]) for e in elements].count((color, kind)) == 1
        ((x1, y1, x2, y2),) = row.answer["boxes"]
        assert row.answer["boxes"][0] == elements[0]["box"]
        pixels = np.asarray(row.images[0].load())
        ys, xs = np.nonzero(np.all(pixels[y1:y2, x1:x2] == COLORS[color], axis=-1))
        # An icon is in the middle: a border of at least 3 pixels on each side of it.
        assert min(xs.min(), ys.min()) >= 3
        assert xs.max() < x2 - x1 - 3
        assert ys.max() < y2 - y1 - 3
        assert len({tuple(pixels[y, x]) for x, y in ((x1, y1), (x2 - 1, y2 - 1))}) == 1  # its edge


def test_buttons_lie_in_the_window_and_do_not_overlap():
    for row in draw_examples("screens:columns=4,rows=3,distractors=11", 100, 1):
        taken = np.zeros((SIDE, SIDE), int)
        for element in row.meta["elements"]:
            x1, y1, x2, y2 = element["box"]
            assert 1 <= x1 < x2 < SIDE
            assert 10 < y1 < y2 < SIDE  # below the title bar
            taken[y1:y2, x1:x2] += 1
        assert taken.max() == 1


def test_training_screens_contain_no_held_out_pair():
    shown, asked = (
        {
            split: {
                pair for row in draw_examples("screens", 300, 1, split) for pair in describe(row)
            }
            for split in ("train", "eval")
        }
        for describe in (
            lambda row: [(e["color"], e["kind"]) for e in row.meta["elements"]],
            lambda row: [read_question(row)],
        )
    )
    new = {("red", "circle"), ("blue", "triangle"), ("yellow", "square")}
    assert asked["eval"] == new
    assert not shown["train"] & new
    assert len(asked["train"]) == 9


def test_every_distractor_shares_the_color_or_the_kind():
    for row in draw_examples("screens:hard", 100, 2):
        color, kind = read_question(row)
        others = row.meta["elements"][1:]
        assert all((e["color"] == color) != (e["kind"] == kind) for e in others)
