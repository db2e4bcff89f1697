"""Files to which a run appends are read after a crash, and errors in them name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.utils.jsonl import parse_lines, read_complete_rows, read_object, read_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("torn", ["", '{"step": 2, "rew', '{"step"', "\0\0\0", "[1]\n"])
def test_a_truncated_last_line_is_left_out(path: Path, torn: str) -> None:
    path.write_text('{"step": 0}\n{"step": 1}\n' + torn)
    assert read_rows(path) == [{"step": 0}, {"step": 1}]


def test_a_last_line_without_a_line_break_is_read(path: Path) -> None:
    path.write_text('{"step": 0}\n{"step": 1}')
    assert read_rows(path) == [{"step": 0}, {"step": 1}]


@pytest.mark.parametrize("broken", ['{"step": 0', "7", "[" * 100_000])
def test_a_broken_line_in_the_middle_is_an_error_with_file_and_line(
    path: Path, broken: str
) -> None:
    path.write_text('{"step": 0}\n\n' + broken + '\n{"step": 2}\n')
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(caught.value) == f"{path}:3 is not a JSON object: repair or delete the line"
    assert list(parse_lines(path)) == [(1, {"step": 0}), (3, None), (4, {"step": 2})]


def test_a_missing_file_has_no_rows(path: Path) -> None:
    assert read_rows(path) == []


def test_unicode_line_separators_do_not_end_a_line(path: Path) -> None:
    path.write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_rows(path) == [{"text": "a\u2028b\x85c"}]


@pytest.mark.parametrize("truncate", [False, True])
def test_an_incomplete_last_line_is_not_read_and_removed_on_request(
    path: Path, truncate: bool
) -> None:
    complete, torn = b'{"step": 0}\n{"step": 1}\n', b'{"step": 2}'
    path.write_bytes(complete + torn)
    assert list(read_complete_rows(path, truncate)) == [{"step": 0}, {"step": 1}]
    assert path.read_bytes() == (complete if truncate else complete + torn)


@pytest.mark.parametrize("broken", [b"\0", b"7", b"", b"\xff", b"[" * 100_000])
def test_a_broken_complete_line_is_an_error_with_file_and_line(path: Path, broken: bytes) -> None:
    path.write_bytes(b'{"step": 0}\n' + broken + b"\n")
    with pytest.raises(UserError, match=r":2 is not a JSON object: repair or delete the line"):
        list(read_complete_rows(path))


@pytest.mark.parametrize("text", [None, "", "[]", '{"a": ', "[" * 100_000, "\xff"])
def test_a_file_that_is_not_an_object_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text, "latin-1")
    with pytest.raises(UserError, match=r"file\.json cannot be read: "):
        read_object(path)


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": 1}')
    assert read_object(tmp_path / "file.json") == {"a": 1}
