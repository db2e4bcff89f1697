"""The part of an empty turn, and the places of images in a chat."""

import pytest

from vlm_grpo.utils.chat import Turn, place_images


def test_a_turn_without_text_has_one_part_and_images_without_places_precede_the_first_question():
    assert Turn("user", "").parts == ("",)
    turns = Turn("system", "s"), Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")
    texts = [turn.text for turn in place_images(turns, 2)]
    assert texts == ["s", "<image><image>a", "b", "c"]
    assert place_images(turns, 0) == turns
    placed = Turn("user", "<image>a"), Turn("assistant", "b"), Turn("user", "c<image>")
    assert place_images(placed, 2) == placed
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"it has 2 <image> in its texts and {count} images"):
            place_images(placed, count)
