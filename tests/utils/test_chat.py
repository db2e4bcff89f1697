"""The parts of a turn, and the places of images in a chat."""

import pytest

from vlm_grpo.utils.chat import Turn, place_images


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("",)),
        ("a", ("a",)),
        ("<image>", (None,)),
        ("<image><image>a", (None, None, "a")),
        ("a <image> b", ("a ", None, " b")),
    ],
)
def test_the_parts_of_a_turn_are_its_texts_and_images(text, parts):
    turn = Turn("user", text)
    assert turn.parts == parts
    content = turn.build_content(iter([{"image": 1}, {"image": 2}]))
    assert [part.get("text") for part in content] == list(parts)
    numbers = [part["image"] for part in content if "image" in part]
    assert numbers == [1, 2][: parts.count(None)]


def test_images_without_places_stand_before_the_first_question():
    turns = Turn("system", "s"), Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")
    texts = [turn.text for turn in place_images(turns, 2)]
    assert texts == ["s", "<image><image>a", "b", "c"]
    assert place_images(turns, 0) == turns
    placed = Turn("user", "<image>a"), Turn("assistant", "b"), Turn("user", "c<image>")
    assert place_images(placed, 2) == placed
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"it has 2 <image> in its texts and {count} images"):
            place_images(placed, count)
