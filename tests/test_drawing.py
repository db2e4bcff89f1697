"""Marks lie where the numbers say, on a copy."""

from __future__ import annotations

from PIL import Image

from vlm_grpo.drawing import draw_boxes, draw_points

RED, WHITE = (255, 0, 0), (255, 255, 255)


def test_a_box_covers_its_pixels_and_none_outside():
    image = Image.new("RGB", (100, 80), "white")
    drawn = draw_boxes(image, [(10, 20, 40, 50)], "red")
    # Edges lie between pixels: the box holds columns 10 to 39 and rows 20 to 49.
    corners = [(10, 20), (39, 20), (10, 49), (39, 49)]
    assert [drawn.getpixel(spot) for spot in corners] == [RED] * 4
    outside = [(9, 20), (10, 19), (40, 49), (39, 50)]
    assert [drawn.getpixel(spot) for spot in outside] == [WHITE] * 4
    assert drawn.getpixel((25, 35)) == WHITE  # an outline
    assert image.getpixel((10, 20)) == WHITE


def test_boxes_beyond_the_image_are_drawn_as_far_as_it_goes():
    image = Image.new("RGB", (100, 80), "white")
    drawn = draw_boxes(image, [(50, -1e6, 1e6, 40), (1000, 1000, 2000, 2000)], "red")
    assert drawn.getpixel((50, 0)) == RED
    assert drawn.getpixel((99, 39)) == RED
    assert drawn.getpixel((99, 60)) == WHITE


def test_labels_are_written_inside():
    image = Image.new("RGB", (100, 80), "white")
    plain = draw_boxes(image, [(10, 10, 90, 70)], "red")
    named = draw_boxes(image, [(10, 10, 90, 70)], "red", labels=["cat"])
    assert plain.tobytes() != named.tobytes()
    assert plain.crop((0, 40, 100, 80)).tobytes() == named.crop((0, 40, 100, 80)).tobytes()


def test_a_point_is_a_dot_around_its_place():
    image = Image.new("RGB", (100, 80), "white")
    drawn = draw_points(image, [(30, 40), (-500, 1e6)], "red")
    assert drawn.getpixel((30, 40)) == RED
    assert drawn.getpixel((36, 40)) == WHITE  # a small one
