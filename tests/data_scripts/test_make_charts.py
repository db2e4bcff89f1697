"""Bar charts: gold answers agree with the pixels, and the evaluation has its own compositions."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from PIL import Image

from vlm_grpo.data_scripts.make_charts import COLORS, SIDE, Charts, draw_examples
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example


def read_bars(example: Example, world: Charts) -> dict[str, int]:
    """Measure the bars of a chart without noise by their highest pixel."""
    pixels = np.asarray(Image.open(io.BytesIO(example.images[0].read_bytes())).convert("RGB"))
    unit, floor = (SIDE - 8) // world.top, SIDE - 3
    found = {}
    for color, rgb in COLORS.items():
        rows = np.flatnonzero((pixels == np.array(rgb)).all(2).any(1))
        if len(rows):
            found[color] = (floor - int(rows[0])) / unit
    return {color: round(value) for color, value in found.items() if value == round(value)}


@pytest.mark.parametrize("split", ["train", "eval"])
def test_answers_agree_with_the_pixels(split: str) -> None:
    task = load_task("numeric", instruction=None)
    kinds = set()
    for example in draw_examples("charts", 120, 3, split):
        bars = read_bars(example, Charts(bars=3, top=6))
        named = re.findall("|".join(COLORS), example.question)
        kinds.add(example.meta["kind"])
        if example.meta["kind"] == "difference":
            assert example.answer == bars[named[0]] - bars[named[1]] > 0
        elif named:
            assert example.answer == bars[named[0]]
        else:
            assert example.answer == max(bars, key=bars.__getitem__)
        assert len(set(bars.values())) == len(bars) in (2, 3)
        assert task.score(task.gold(example), example).total == 1.0
    assert kinds == {"value", "difference", "highest"}


def list_compositions(split: str, kind: str) -> set[tuple[str, object]]:
    """Return the color and value of each question of a kind, or the two colors it compares."""
    found = set()
    for example in draw_examples("charts", 800, 0, split):
        if example.meta["kind"] == kind:
            bars = read_bars(example, Charts(bars=3, top=6))
            named = re.findall("|".join(COLORS), example.question) or [example.answer]
            found.add((named[0], named[1] if kind == "difference" else bars[named[0]]))
    return found


@pytest.mark.parametrize("kind", ["value", "difference", "highest"])
def test_the_evaluation_asks_about_other_compositions(kind: str) -> None:
    train, held_out = list_compositions("train", kind), list_compositions("eval", kind)
    assert train
    assert held_out
    assert not train & held_out
    assert {color for color, _ in held_out} <= {color for color, _ in train}
