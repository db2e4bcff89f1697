"""JSON arrays and CSV files: the same examples as from JSON Lines, and named problems."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from dataset_files import get_load_error, make_row

from vlm_grpo.data import load_examples
from vlm_grpo.task.registry import load_task

COUNTING = load_task("counting")


def write_csv(path: Path, *rows: list[Any]) -> str:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def test_a_json_array_is_read_like_json_lines(folder: Path):
    path = folder / "rows.json"
    path.write_text(json.dumps([make_row(), make_row(id=...)], indent=2))

    first, second = load_examples(str(path), COUNTING)

    assert (first.name, first.images[0].size) == (f"{path} row 1: example a", (8, 6))
    assert second.id == "row-2"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"images": []}', "must be a JSON array of objects or have COCO's images and annotations"),
        ('{"id": 1}\n{"id": 2}', "it is not JSON: Extra data at line 2, column 1; a file with one"),
        ("[1, NaN]", "it is not JSON: it contains NaN"),
        ("[3]", "row 1: it must be a JSON object, not a int"),
        ("[]", "has no examples"),
        ("\udcff", "it is not UTF-8"),
    ],
)
def test_a_json_file_of_another_form_is_named(folder: Path, content: str, reason: str):
    path = folder / "rows.json"
    path.write_bytes(content.encode(errors="surrogateescape"))

    message = get_load_error(str(path))

    assert str(path) in message
    assert reason in message


def test_csv_cells_are_read_as_the_task_needs_them(folder: Path):
    header = ["image", "question", "answer", "level"]
    cells = ["a.png", 'How many, "roughly"?', 3, ""]
    source = write_csv(folder / "rows.csv", header, cells, ["", "How\nmany?", 4, "hard"])

    first, second = load_examples(source, COUNTING)

    assert (first.id, first.question, first.answer) == ("row-1", 'How many, "roughly"?', 3)
    assert (first.images[0].size, first.meta["level"]) == ((8, 6), None)
    assert (second.id, second.images, second.meta["level"]) == ("row-2", (), "hard")
    assert second.location == f"{source}:4"  # its question has two lines


@pytest.mark.parametrize("suffix", [".tsv", ".TSV"])
def test_cells_of_a_tsv_file_are_separated_by_tabs(folder: Path, suffix: str):
    path = folder / f"rows{suffix}"
    path.write_text("image\tquestion\tanswer\na.png\tHow many, roughly?\t3\n")

    (example,) = load_examples(str(path), COUNTING)

    assert (example.question, example.answer) == ("How many, roughly?", 3)


def test_csv_boxes_are_parsed(folder: Path):
    source = write_csv(
        folder / "b.csv", ["image", "question", "answer"], ["a.png", "?", "[1,2,3,4]"]
    )

    assert load_examples(source, load_task("grounding"))[0].answer == {"boxes": [[1, 2, 3, 4]]}


def test_bad_csv_is_named(folder: Path):
    path = folder / "rows.csv"
    header, good = ["question", "answer"], ["How many?", 3]
    source = write_csv(path, header, good, ["How many?"], [*good, "more"])

    message = get_load_error(source)
    assert f"{source}:3: it does not have 2 cells as the header" in message
    assert f"{source}:4: it does not have 2 cells as the header" in message
    path.write_bytes(b"question,answer\n\xff,3\n")
    assert f"file {path} cannot be read: 'utf-8' codec" in get_load_error(source)
    path.write_text('question,answer\n"open,3\n')
    assert f"file {path} cannot be read: unexpected end of data" in get_load_error(source)
