"""Small tables: their cells are drawn where the answer has them, and the evaluation has its own
columns."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vlm_grpo.data_scripts.make_tables import CELL, DIGITS, LETTERS, Tables, draw_examples
from vlm_grpo.task.registry import load_task


def list_columns(split: str) -> set[tuple[str, str]]:
    """Return the first characters of the word and of the number below it, of each column."""
    tables = (example.answer.split("\n") for example in draw_examples("tables", 600, 0, split))
    pairs = (zip(words.split("|"), numbers.split("|"), strict=True) for words, numbers in tables)
    return {(word[0], number[0]) for columns in pairs for word, number in columns}


def test_every_table_of_the_evaluation_has_a_column_that_training_never_has():
    train = list_columns("train")
    assert {letter for letter, _ in train} == set(LETTERS)
    assert {digit for _, digit in train} == set(DIGITS)
    for example in draw_examples("tables", 100, 0, "eval"):
        words, numbers = (row.split("|") for row in example.answer.split("\n"))
        assert any((w[0], n[0]) not in train for w, n in zip(words, numbers, strict=True))


@pytest.mark.parametrize("level", Tables.levels)
def test_a_table_fits_its_image_and_the_task(level: str) -> None:
    task = load_task("table", form="markdown", instruction=None)
    for example in draw_examples(f"tables:{level}", 20, 1):
        task.check(example)
        assert task.score(task.gold(example), example).total == 1.0
        rows = [row.split("|") for row in example.answer.split("\n")]
        assert example.images[0].size == (len(rows[0]) * CELL[0], len(rows) * CELL[1])
    few, many = (draw_examples(f"tables:{level}", count, 5) for count in (2, 4))
    assert few == many[:2]
    assert draw_examples(f"tables:{level}", 2, 6) != few


def test_every_cell_has_its_text_inside() -> None:
    for example in draw_examples("tables:medium,longest=3", 30, 2):
        image = Image.open(io.BytesIO(example.images[0].read_bytes())).convert("L")
        light = np.asarray(image) > 180
        for row in range(2):
            for column in range(2):
                x, y = column * CELL[0], row * CELL[1]
                cell = light[y : y + CELL[1], x : x + CELL[0]]
                assert cell[2:-2, 2:-1].any()
                assert not cell[:2].any()
                assert not cell[:, -1].any()
