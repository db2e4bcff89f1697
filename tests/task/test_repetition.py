"""The share of repeated words, compared with counts by hand."""

import pytest

from vlm_grpo.task.repetition import repeated_share


def test_repeated_share():
    for text, share in (
        ("", 0.0),
        ("one two three four five six", 0.0),  # a single 6-gram
        ("a " * 105, 0.99),  # 100 equal 6-grams
        ("你好世界" * 3, 3 / 7),  # 12 characters with 7 6-grams, 4 of them distinct
        ('[{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [5, 6, 7, 8]}]', 0.0),
        ("A b c d e f a B C D E F", 1 / 7),  # letters of both cases are equal
        ("no no no", 0.0),  # shorter than an n-gram
    ):
        assert repeated_share(text) == pytest.approx(share)
