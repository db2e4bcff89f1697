"""Bar charts: gold answers agree with the pixels, and the evaluation has its own compositions."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from PIL import Image

from vlm_grpo.data_scripts.make_charts import COLORS, SIDE, Charts, draw_examples
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example

LEVELS = tuple(Charts.levels)


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


@pytest.mark.parametrize("level", LEVELS)
def test_a_chart_depends_on_its_number_alone(level: str) -> None:
    few, many = (draw_examples(f"charts:{level}", count, 5) for count in (2, 4))
    assert few == many[:2]
    assert draw_examples(f"charts:{level}", 2, 6) != few


def test_a_wrong_dial_is_one_message() -> None:
    with pytest.raises(UserError, match=r"Levels: easy, medium, hard; dials: .*questions"):
        draw_examples("charts:easy,bars=9", 1)


def test_the_command_line_draws_charts_by_default(tmp_path) -> None:
    assert draw_examples.main(["--count", "2", "--out", str(tmp_path / "charts")]) == 0
    assert len((tmp_path / "charts/charts.jsonl").read_text().splitlines()) == 2
