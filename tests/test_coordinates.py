"""Every frame converts both ways, and what it writes is read back as the same box."""

from __future__ import annotations

import random

import pytest

from vlm_grpo.coordinates import FRAMES, Box, CoordinateFrame, Size, gold_boxes
from vlm_grpo.parsing import parse_boxes
from vlm_grpo.scoring import iou

SIZE, SEEN = (640, 480), (320, 240)
BOX = (64.0, 48.0, 320.0, 240.0)


def units(frame: CoordinateFrame, size: Size, seen: Size) -> tuple[float, float]:
    """Original pixels per unit of the frame, by the frame's definition."""
    whole = {"original": size, "resized": seen, "paligemma": (1024, 1024)}
    width, height = whole.get(frame.name, (1000, 1000))
    return size[0] / width, size[1] / height


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("original", '{"bbox_2d": [64, 48, 320, 240]}'),
        ("resized", '{"bbox_2d": [32, 24, 160, 120]}'),  # the model saw half of each side
        ("permille", '{"bbox_2d": [100, 100, 500, 500]}'),  # a tenth to a half of each side
        ("qwen2_vl", "<|box_start|>(100,100),(500,500)<|box_end|>"),
        ("internvl", "<box>[[100,100,500,500]]</box>"),
        # 0.1 · 1024 = 102.4 and 0.5 · 1024 = 512, y before x
        ("paligemma", "<loc0102><loc0102><loc0512><loc0512>"),
    ],
)
def test_a_box_is_written_in_the_familys_grammar(name: str, written: str):
    assert FRAMES[name].write(BOX, SIZE, SEEN) == written


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
def test_round_trip_through_text_is_exact_to_half_a_unit(frame: CoordinateFrame):
    rng = random.Random(frame.name)
    for _ in range(10_000):
        size = (rng.randint(28, 4000), rng.randint(28, 4000))
        seen = (28 * rng.randint(1, 100), 28 * rng.randint(1, 100))
        x, y = units(frame, size, seen)
        # Boxes of at least a unit, short of the last one, which PaliGemma cannot write.
        x1, y1 = rng.uniform(0, size[0] - 3 * x), rng.uniform(0, size[1] - 3 * y)
        x2, y2 = rng.uniform(x1 + x, size[0] - x), rng.uniform(y1 + y, size[1] - y)

        read = parse_boxes(frame.write((x1, y1, x2, y2), size, seen))

        assert read is not None
        got = frame.to_pixels(read[0][0], size, seen)
        for value, wanted, unit in zip(got, (x1, y1, x2, y2), (x, y, x, y), strict=True):
            assert abs(value - wanted) <= unit * (0.5 + 1e-9)  # rounding moves half a unit


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
def test_a_box_thinner_than_a_unit_is_still_a_box(frame: CoordinateFrame):
    size = seen = (100_000, 100_000)  # a thousandth of it is 100 pixels, 1/1024 nearly so
    thin = [(50.2, 10.3, 50.4, 10.4), (99_999.5, 99_999.5, 99_999.9, 99_999.9)]
    for box in thin:
        read = parse_boxes(frame.write(box, size, seen))
        assert read is not None
        for value, wanted in zip(frame.to_pixels(read[0][0], size, seen), box, strict=True):
            assert abs(value - wanted) <= 2 * 100_000 / 1000  # within two of the coarsest units


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
def test_several_labelled_boxes_come_back_with_their_labels(frame: CoordinateFrame):
    boxes = [BOX, (32.0, 24.0, 608.0, 456.0)]
    written = frame.write_all(boxes, SIZE, SEEN, labels=["red mug", "猫"])
    read = parse_boxes(written)
    assert read is not None
    assert [label for _, label in read] == ["red mug", "猫"]
    for (got, _), wanted in zip(read, boxes, strict=True):
        assert iou(frame.to_pixels(got, SIZE, SEEN), wanted) > 0.98  # half units of 1/1000
    unlabelled = parse_boxes(frame.write_all(boxes, SIZE, SEEN))
    assert unlabelled is not None
    assert [(box, None) for box, _ in read] == unlabelled


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
def test_no_boxes_are_written_as_an_empty_list(frame: CoordinateFrame):
    assert frame.write_all([], SIZE, SEEN) == "[]"
    assert parse_boxes("[]") == []


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
def test_least_iou_bounds_what_rounding_loses(frame: CoordinateFrame):
    rng = random.Random(frame.name)
    tightest = 1.0
    for _ in range(2_000):
        x1, y1 = rng.uniform(0, 600), rng.uniform(0, 440)
        box = (x1, y1, rng.uniform(x1 + 1, 640), rng.uniform(y1 + 1, 480))
        read = parse_boxes(frame.write(box, SIZE, SEEN))
        assert read is not None
        left = iou(frame.to_pixels(read[0][0], SIZE, SEEN), box)
        bound = frame.least_iou(box, SIZE, SEEN)
        assert left >= bound - 1e-9
        tightest = min(tightest, left - bound)
    assert tightest < 0.1  # and is not a bound that anything meets


def test_whole_pixels_lose_nothing():
    assert FRAMES["original"].least_iou((10, 10, 20, 20), SIZE, SEEN) == 1.0
    # A 10 × 10 box between pixels may lose half a pixel at each edge: 9 × 9 of 10 × 10 is left.
    assert FRAMES["original"].least_iou((10.5, 10, 20.5, 20), SIZE, SEEN) == pytest.approx(0.81)


def test_the_prompt_names_the_units():
    assert "pixels of the 640x480 image" in FRAMES["original"].describe(SIZE)
    assert "0-1000" in FRAMES["permille"].describe(SIZE)
    assert FRAMES["resized"].describe(SIZE, form="[x, y]") == "[x, y] in pixels"


def test_gold_boxes_are_read_as_they_stand():
    answer = {"boxes": [[1, 2, 3, 4], [-5, 0.5, 6, 7]], "labels": ["a", "b"]}
    assert gold_boxes(answer) == ((1.0, 2.0, 3.0, 4.0), (-5.0, 0.5, 6.0, 7.0))
    assert gold_boxes({"boxes": []}) == ()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "no list of boxes"),
        ([1, 2, 3, 4], "no list of boxes"),
        ({"boxes": "1234"}, "no list of boxes"),
        ({"boxes": [1, 2, 3, 4]}, "must be four numbers"),
        ({"boxes": [[1, 2, 3]]}, "must be four numbers"),
        ({"boxes": [["a", 2, 3, 4]]}, "must be four numbers"),
        ({"boxes": [[100, 100, 50, 50]]}, "x1 < x2"),  # what a width and a height look like
        ({"boxes": [[1, 2, 1, 4]]}, "x1 < x2"),
        ({"boxes": [[1, 2, float("inf"), 4]]}, "finite"),
        ({"boxes": [[1, 2, float("nan"), 4]]}, "finite"),
    ],
)
def test_a_bad_gold_answer_is_refused_with_its_reason(answer: object, reason: str):
    with pytest.raises(ValueError, match=reason):
        gold_boxes(answer)


def test_conversion_is_linear_in_both_directions():
    box: Box = (-20.0, 0.0, 5000.0, 480.0)  # not clipped to the image
    for frame in FRAMES.values():
        there = frame.from_pixels(box, SIZE, SEEN)
        assert frame.to_pixels(there, SIZE, SEEN) == pytest.approx(box, abs=1e-9)
