"""Held-out examples that are split off by their images."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from vlm_grpo.data.image_split import split_by_image
from vlm_grpo.errors import UserError
from vlm_grpo.types import Example, ImageRef


def image(name: str, data: bytes | None = None) -> ImageRef:
    path = None if data is not None else Path("/somewhere") / name
    return ImageRef(name, (8, 8), (8, 8), path, data)


def build_examples(count: int = 300) -> list[Example]:
    """Return rows: each image in three of them, and some images joined by a row with both."""
    found = []
    for number in range(count):
        images = [image(f"{number // 3}.png")]
        if number % 30 == 0:  # joins this image to the next
            images.append(image(f"{number // 3 + 1}.png"))
        found.append(Example(str(number), tuple(images), "How many?", 1))
    return found


def names(examples: Sequence[Example]) -> set[str]:
    return {image.name for example in examples for image in example.images}


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_no_image_is_on_both_sides(share: float) -> None:
    examples = build_examples()
    train, held_out = split_by_image(examples, share, seed=0)
    assert not names(train) & names(held_out)
    assert sorted([*train, *held_out], key=lambda e: int(e.id)) == examples
    assert share * 300 <= len(held_out) <= share * 300 + 6
    assert [e.id for e in train] == sorted((e.id for e in train), key=int)


def test_the_split_depends_on_images_and_seed_only() -> None:
    examples = build_examples()
    chosen = {e.id for e in split_by_image(examples, 0.1, 0)[1]}
    shuffled = random.Random(1).sample(examples, len(examples))
    assert {e.id for e in split_by_image(shuffled, 0.1, 0)[1]} == chosen
    moved = [
        replace(e, images=tuple(replace(i, path=Path("/else") / i.name) for i in e.images))
        for e in examples
    ]
    assert {e.id for e in split_by_image(moved, 0.1, 0)[1]} == chosen
    assert {e.id for e in split_by_image(examples, 0.1, 1)[1]} != chosen


def test_equal_bytes_are_one_image_and_equal_questions_one_text() -> None:
    encoded = [Example(str(n), (image(f"row {n}", b"same"),), "?", 1) for n in range(4)]
    texts = [Example(f"t{n}", (), "What?", 1) for n in range(4)]
    for held_out in (split_by_image([*encoded, *texts], 0.1, seed)[1] for seed in range(5)):
        assert list(held_out) in (encoded, texts)


@pytest.mark.parametrize("examples", [build_examples(3), build_examples(1), build_examples(3)[:2]])
def test_one_image_cannot_be_split(examples: Sequence[Example]) -> None:
    with pytest.raises(UserError, match=r"data.eval_share=0.2 cannot split .* give data.eval"):
        split_by_image(examples, 0.2, 0)
