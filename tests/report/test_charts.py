"""Charts as data of the page, and colors that each reader can tell apart."""

from __future__ import annotations

import itertools
import math
import re
from importlib import resources

import numpy as np
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


# Machado, Oliveira and Fernandes 2009, IEEE TVCG 15, severity 1: protanopia, deuteranopia and
# tritanopia, as matrices of linear RGB.
BLINDNESS = np.array(
    [
        *(0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216),
        *(-0.003882, -0.048116, 1.051998),
        *(0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413),
        *(-0.011820, 0.042940, 0.968881),
        *(1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602),
        *(0.004733, 0.691367, 0.303900),
    ]
).reshape(3, 3, 3)
# https://bottosson.github.io/posts/oklab
TO_CONES, TO_OKLAB = np.array(
    [
        *(0.4122214708, 0.5363325363, 0.0514459929, 0.2119034982, 0.6806995451, 0.1073969566),
        *(0.0883024619, 0.2817188376, 0.6299787005),
        *(0.2104542553, 0.7936177850, -0.0040720468, 1.9779984951, -2.4285922050, 0.4505937099),
        *(0.0259040371, 0.7827717662, -0.8086757660),
    ]
).reshape(2, 3, 3)


def read_colors(theme: int, name: str) -> np.ndarray:
    """Return the colors of variables in the light (0) or the dark theme (1), as linear RGB."""
    css = resources.files("vlm_grpo.report").joinpath("page.css").read_text("utf-8")
    block = css.split("color-scheme:")[theme + 1].partition("}")[0]
    codes = re.findall(rf"--{name}: #([0-9a-f]{{6}})", block)
    values = np.array([[int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)] for code in codes])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def to_oklab(linear: np.ndarray) -> np.ndarray:
    return np.cbrt(np.clip(linear, 0, 1) @ TO_CONES.T) @ TO_OKLAB.T


@pytest.mark.parametrize("theme", [0, 1])
def test_series_differ_for_every_reader(theme: int) -> None:
    series = read_colors(theme, r"series-\d")
    assert len(series) == 10
    for matrix in (np.eye(3), *BLINDNESS):
        seen = to_oklab(series @ matrix.T)
        nearest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))
        assert nearest >= 0.1  # CSS Color 4: 0.02 can just be told apart


@pytest.mark.parametrize("theme", [0, 1])
def test_series_stand_out_from_the_card(theme: int) -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])  # relative luminance, WCAG 2.2
    card = float((read_colors(theme, "card") @ weights).item())
    for luminance in read_colors(theme, r"series-\d") @ weights:
        low, high = sorted((card, float(luminance)))
        assert (high + 0.05) / (low + 0.05) >= 3  # WCAG 1.4.11
