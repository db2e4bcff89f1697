"""JSON Lines, JSON arrays and CSV files: the same examples, and every malformed line named."""

import json
from pathlib import Path

import pytest
from dataset_files import get_load_error, load, make_row, write_rows

from vlm_grpo.data.files import MAX_DEPTH, MAX_LINE_BYTES, parse_object, read_jsonl
from vlm_grpo.errors import UserError


def test_a_json_array_is_read_like_json_lines(folder):
    path = folder / "rows.json"
    path.write_text(json.dumps([make_row(), make_row(id=...)], indent=2))
    first, second = load(path)
    assert (first.name, first.images[0].size) == (f"{path} row 1: example a", (8, 6))
    assert second.id == "row-2"


def test_csv_cells_are_read_as_the_task_needs_them(folder):
    lines = ["\ufeffimage,question,answer,level", 'a.png,"How many, ""roughly""?",3,']
    source = folder / "rows.csv"
    source.write_text("\n".join([*lines, ',"How\nmany?",4,hard']))
    first, second = load(source)
    assert (first.id, first.question, first.answer) == ("row-1", 'How many, "roughly"?', 3)
    assert (first.images[0].size, first.meta["level"]) == ((8, 6), None)
    assert (second.id, second.images, second.meta["level"]) == ("row-2", (), "hard")
    assert second.location == f"{source}:4"  # its question has two lines
    for suffix in (".tsv", ".TSV"):
        path = folder / f"rows{suffix}"
        path.write_text("image\tquestion\tanswer\na.png\tHow many, roughly?\t3\n")
        (example,) = load(path)
        assert (example.question, example.answer) == ("How many, roughly?", 3)


def test_rows_have_the_location_of_their_line(tmp_path):
    source = write_rows(tmp_path, '\ufeff{"a": 1}', "", "  ", '{"a": ', '{"a": 2}')
    rows = list(read_jsonl(Path(source)))
    places = [(f"{source}:{line}", line) for line in (1, 4, 5)]
    assert [(row.location, row.number) for row in rows] == places
    assert [row.values for row in rows] == [{"a": 1}, {}, {"a": 2}]
    assert [row.problem is None for row in rows] == [True, False, True]
    assert rows[0].strict
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read: No such file"):
        list(read_jsonl(tmp_path / "none.jsonl"))


def test_the_maximum_depth_is_accepted():
    nested = b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert list(parse_object(nested)) == ["a"]
    with pytest.raises(ValueError, match="nested deeper"):
        parse_object(b'{"a":' + nested + b"}")


def test_a_line_beyond_the_limit_is_one_bad_row_which_is_logged_and_skipped(folder, caplog):
    source = write_rows(folder, '{"id": "' + "x" * (2 * MAX_LINE_BYTES) + '"}', make_row())
    assert f"{source}:1: the line is longer than" in get_load_error(source)
    assert [e.id for e in load(source, on_bad_row="skip")] == ["a"]
    assert "skipped 1 bad row, kept 1" in caplog.text
    assert f"{source}:1: the line is longer" in caplog.text
