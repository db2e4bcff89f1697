"""JSON Lines: locations of rows, and the reason why each malformed line is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from dataset_files import check_bad_row, get_load_error, make_row, write_rows

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.data.jsonl import MAX_DEPTH, MAX_LINE_BYTES, parse_object, read_jsonl
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task


def test_rows_have_the_location_of_their_line(tmp_path: Path):
    source = write_rows(tmp_path, '\ufeff{"a": 1}', "", "  ", '{"a": ', '{"a": 2}')

    rows = list(read_jsonl(Path(source)))

    assert [(row.location, row.number) for row in rows] == [
        (f"{source}:{line}", line) for line in (1, 4, 5)
    ]
    assert [row.values for row in rows] == [{"a": 1}, {}, {"a": 2}]
    assert [row.problem is None for row in rows] == [True, False, True]
    assert rows[0].strict


def test_the_maximum_depth_is_accepted():
    nested = b'{"a":' * MAX_DEPTH + b"1" + b"}" * MAX_DEPTH
    assert list(parse_object(nested)) == ["a"]
    with pytest.raises(ValueError, match="nested deeper"):
        parse_object(b'{"a":' + nested + b"}")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"id": "a", "question"', "the line is not JSON: Expecting ':' delimiter at column"),
        ('{"id": "a", "answer": NaN}', "it contains NaN"),
        ("[1, 2]", "must be a JSON object, not a list"),
        (b'{"id": "\xff"}', "not UTF-8"),
        ('{"a":' * 40 + "1" + "}" * 40, f"nested deeper than {MAX_DEPTH}"),
        ('{"a":' + "[" * 200_000 + "]" * 200_000 + "}", f"nested deeper than {MAX_DEPTH}"),
        ('{"a": ' + "9" * 5000 + "}", "the line is not JSON"),
    ],
    ids=["truncated", "NaN", "list", "not UTF-8", "deep", "very deep", "long number"],
)
def test_a_malformed_line_is_named_with_file_line_and_reason(
    folder: Path, bad: str | bytes, reason: str
):
    check_bad_row(folder, bad, reason)


def test_a_line_beyond_the_limit_is_one_bad_row_and_reading_continues(folder: Path):
    source = write_rows(folder, '{"id": "' + "x" * (2 * MAX_LINE_BYTES) + '"}', make_row())

    assert f"{source}:1: the line is longer than" in get_load_error(source)
    data = DataSettings(train=source, on_bad_row="skip")
    assert [e.id for e in load_examples(source, load_task("counting"), data)] == ["a"]


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read: No such file"):
        list(read_jsonl(tmp_path / "none.jsonl"))
