"""Boxes, points and captions on a copy of an image."""

from PIL import Image, ImageChops

from vlm_grpo.task.drawing import GOLD_COLOR, PREDICTED_COLOR, draw_boxes, draw_caption, draw_points
from vlm_grpo.tasks.table import draw_table

RED, WHITE = (255, 0, 0), (255, 255, 255)
EMPTY = Image.new("RGB", (100, 80), "white")


def test_a_box_outlines_its_pixels_and_none_outside_and_is_clipped_to_the_image():
    drawn = draw_boxes(EMPTY, [(10, 20, 40, 50)], "red")
    # Edges lie between pixels: the box holds columns 10 to 39 and rows 20 to 49.
    corners = [(10, 20), (39, 20), (10, 49), (39, 49)]
    assert [drawn.getpixel(spot) for spot in corners] == [RED] * 4
    outside = [(9, 20), (10, 19), (40, 49), (39, 50)]
    assert [drawn.getpixel(spot) for spot in outside] == [WHITE] * 4
    assert drawn.getpixel((25, 35)) == WHITE  # only the outline is drawn
    assert EMPTY.getpixel((10, 20)) == WHITE
    drawn = draw_boxes(EMPTY, [(50, -1e6, 1e6, 40), (1000, 1000, 2000, 2000)], "red")
    assert [drawn.getpixel(spot) for spot in [(50, 0), (99, 39), (99, 60)]] == [RED, RED, WHITE]


def test_labels_are_drawn_inside_their_box_and_a_point_is_a_dot():
    plain = draw_boxes(EMPTY, [(10, 10, 90, 70)], "red")
    labeled = draw_boxes(EMPTY, [(10, 10, 90, 70)], "red", labels=["cat"])
    assert plain.tobytes() != labeled.tobytes()
    assert plain.crop((0, 40, 100, 80)).tobytes() == labeled.crop((0, 40, 100, 80)).tobytes()
    drawn = draw_points(EMPTY, [(30, 40), (-500, 1e6)], "red")
    assert drawn.getpixel((30, 40)) == RED
    assert drawn.getpixel((36, 40)) == WHITE  # the dot is small


def test_a_caption_has_at_most_eight_lines():
    image = Image.new("RGB", (84, 84))
    one = draw_caption(image, "word", "red")
    many = draw_caption(image, "word\n" * 100, "red")
    assert many.height - one.height == 7 * 15  # seven more lines of 15 pixels
    assert draw_caption(image, "", "red").height == one.height


def test_tables_of_gold_and_answer_are_drawn_side_by_side():
    image, rows = Image.new("RGB", (200, 100), "gray"), [["a", "b"], ["c"]]
    drawn = (draw_table(image, rows, color) for color in (GOLD_COLOR, PREDICTED_COLOR))
    left, right = (ImageChops.difference(image, each).getbbox() or (0,) * 4 for each in drawn)
    assert (left[0], right[0]) == (0, 100)
    assert left[2] <= 100
    assert draw_table(image, [], GOLD_COLOR).tobytes() == image.tobytes()
    assert draw_table(Image.new("RGB", (1, 1)), [["a"] * 50] * 50, GOLD_COLOR).size == (1, 1)
