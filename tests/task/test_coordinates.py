"""Conversion and round trips of boxes in all coordinate frames, and the check of gold boxes."""

import random

import numpy as np
import pytest

from vlm_grpo.task.coordinates import FRAMES, Box, CoordinateFrame, Size, gold_boxes
from vlm_grpo.task.parsing import parse_boxes, parse_points
from vlm_grpo.task.scores import iou

SIZE, RESIZED = (640, 480), (320, 240)
BOX = (64.0, 48.0, 320.0, 240.0)


@pytest.fixture(params=FRAMES.values(), ids=list(FRAMES))
def frame(request: pytest.FixtureRequest) -> CoordinateFrame:
    return request.param


def read(frame: CoordinateFrame, text: str, size: Size, resized_size: Size) -> list[Box]:
    """Return the boxes in a text, in original pixels."""
    parsed = parse_boxes(text, y_first=frame.y_first) or ()
    return [frame.to_pixels(box, size, resized_size) for box, _ in parsed]


def test_a_box_is_written_in_the_grammar_of_its_family():
    assert {name: frame.write_all([BOX], SIZE, RESIZED) for name, frame in FRAMES.items()} == {
        "original": '{"bbox_2d": [64, 48, 320, 240]}',
        "resized": '{"bbox_2d": [32, 24, 160, 120]}',  # resized to half of each side
        "permille": '{"bbox_2d": [100, 100, 500, 500]}',  # a tenth to a half of each side
        "fraction": '{"bbox_2d": [0.1, 0.1, 0.5, 0.5]}',
        "qwen2_vl": "<|box_start|>(100,100),(500,500)<|box_end|>",
        "internvl": "<box>[[100,100,500,500]]</box>",
        # 0.1 · 1024 = 102.4 and 0.5 · 1024 = 512, y before x
        "paligemma": "<loc0102><loc0102><loc0512><loc0512>",
        "glm": '<|begin_of_box|>{"bbox_2d": [100, 100, 500, 500]}<|end_of_box|>',
        "gemma4": '{"box_2d": [100, 100, 500, 500]}',
        "molmo": '{"bbox_2d": [10.0, 10.0, 50.0, 50.0]}',  # hundredths of each side
    }


def test_a_round_trip_through_text_is_accurate_to_half_a_unit(frame):
    rng = random.Random(frame.name)
    for _ in range(2_000):
        size = (rng.randint(28, 4000), rng.randint(28, 4000))
        resized_size = (28 * rng.randint(1, 100), 28 * rng.randint(1, 100))
        spans = {"original": size, "resized": resized_size, "paligemma": (1024, 1024)}
        x, y = np.divide(size, spans.get(frame.name, (1000, 1000)))  # original pixels per unit
        # Boxes of at least one unit that end before the last one, which PaliGemma cannot write.
        x1, y1 = rng.uniform(0, size[0] - 3 * x), rng.uniform(0, size[1] - 3 * y)
        x2, y2 = rng.uniform(x1 + x, size[0] - x), rng.uniform(y1 + y, size[1] - y)
        written = frame.write_all([(x1, y1, x2, y2)], size, resized_size)
        (result,) = read(frame, written, size, resized_size)
        for value, expected, unit in zip(result, (x1, y1, x2, y2), (x, y, x, y), strict=True):
            assert abs(value - expected) <= unit * (0.5 + 1e-9)  # rounding moves half a unit


def test_a_box_thinner_than_a_unit_keeps_an_area(frame):
    size = (100_000, 100_000)  # a thousandth of it is 100 pixels, 1/1024 nearly so
    for box in [(50.2, 10.3, 50.4, 10.4), (99_999.5, 99_999.5, 99_999.9, 99_999.9)]:
        (found,) = read(frame, frame.write_all([box], size, size), size, size)
        assert found == pytest.approx(box, abs=2 * 100_000 / 1000)  # two of the coarsest units


def test_least_iou_bounds_the_loss_by_rounding(frame):
    rng = random.Random(frame.name)
    smallest_slack = 1.0
    for _ in range(2_000):
        x1, y1 = rng.uniform(0, 600), rng.uniform(0, 440)
        box = (x1, y1, rng.uniform(x1 + 1, 640), rng.uniform(y1 + 1, 480))
        (found,) = read(frame, frame.write_all([box], SIZE, RESIZED), SIZE, RESIZED)
        slack = iou(found, box) - frame.least_iou(box, SIZE, RESIZED)
        assert slack >= -1e-9
        smallest_slack = min(smallest_slack, slack)
    assert smallest_slack < 0.1  # the bound is not trivial


def test_points_survive_a_round_trip(frame):
    points = [(64.0, 240.0), (576.0, 48.0)]
    for some in (points, points[:1]):
        written = frame.write_points(some, SIZE, RESIZED)
        parsed = parse_points(written, frame.describe_units(SIZE), frame.y_first) or ()
        found = [frame.to_pixels((x, y, x, y), SIZE, RESIZED)[:2] for x, y in parsed]
        # Whole units of every frame but PaliGemma's, whose unit is 640/1024 pixels.
        assert found == [pytest.approx(point, abs=0.625) for point in some]
    key = "point" if frame.y_first else "point_2d"
    assert f'"{key}"' in frame.describe_point(SIZE)


def test_integer_coordinates_lose_nothing():
    assert FRAMES["original"].least_iou((10, 10, 20, 20), SIZE, RESIZED) == 1.0
    # A 10 × 10 box between pixels may lose half a pixel per edge: 9 × 9 of 10 × 10 remain.
    assert FRAMES["original"].least_iou((10.5, 10, 20.5, 20), SIZE, RESIZED) == pytest.approx(0.81)


def test_a_bad_gold_answer_is_refused_with_the_reason():
    for answer, reason in (
        (None, "no list of boxes"),
        ([1, 2, 3, 4], "no list of boxes"),
        ({"boxes": "1234"}, "no list of boxes"),
        ({"boxes": [1, 2, 3, 4]}, "must be four numbers"),
        ({"boxes": [[1, 2, 3]]}, "must be four numbers"),
        ({"boxes": [["a", 2, 3, 4]]}, "must be four numbers"),
        ({"boxes": [[True, 1, 10, 10]]}, "must be four numbers"),
        ({"boxes": [[100, 100, 50, 50]]}, "x1 < x2"),  # a width and a height
        ({"boxes": [[1, 2, 1, 4]]}, "x1 < x2"),
        ({"boxes": [[1, 2, float("inf"), 4]]}, "finite"),
        ({"boxes": [[1, 2, float("nan"), 4]]}, "finite"),
    ):
        with pytest.raises(ValueError, match=reason):
            gold_boxes(answer)
