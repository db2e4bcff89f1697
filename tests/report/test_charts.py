"""Charts are packed as data of the page, which draws them (``test_browser.py``)."""

from __future__ import annotations

import math

import pytest

from vlm_grpo.report.charts import MAX_POINTS, Chart, Line, pack_charts


def test_lines_share_their_steps_and_keep_the_series_of_their_run() -> None:
    lines = [
        Line("a", [1, 2], [0.5, math.nan], series=0),
        Line("b", [1, 2], [math.nan, math.inf], series=1),  # without values
        Line("c", [1, 2], [1.0, 2 / 3], series=2),
    ]
    packed = pack_charts([Chart("t", "h", lines), Chart("u", "h", lines[:1])])
    assert packed["xs"] == [(1, 2)]
    first = packed["charts"][0]["lines"]
    assert [(line["name"], line["series"], line["x"]) for line in first] == [
        ("a", 0, 0),
        ("c", 2, 0),
    ]
    assert [line["y"] for line in first] == [[0.5, None], [1.0, 0.6667]]  # four digits


@pytest.mark.parametrize(("steps", "points"), [(2000, 2000), (2001, 1001), (9999, 2000)])
def test_long_lines_are_averaged(steps: int, points: int) -> None:
    line = Line("a", range(steps), [float(step) for step in range(steps)])
    packed = pack_charts([Chart("t", "h", [line])])
    values = packed["charts"][0]["lines"][0]["y"]
    assert len(values) == len(packed["xs"][0]) == points <= MAX_POINTS
    size = math.ceil(steps / MAX_POINTS)  # the second point is the mean of the second part
    assert values[1] == pytest.approx(size + (size - 1) / 2, rel=1e-3)
    assert packed["xs"][0][1] == pytest.approx(size + (size - 1) / 2)
