"""Files to which a run appends are read after a crash, and errors in them name the line."""

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.utils.jsonl import read_object, read_rows, read_valid_rows


@pytest.mark.parametrize("broken", [b'{"step": 0', b"7", b"[" * 100_000, b"\0", b"\xff"])
def test_a_broken_line_is_an_error_with_file_and_line(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n\n' + broken + b'\n{"step": 2}\n')
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(caught.value) == f"{path}:3 is not a JSON object: repair or delete the line"
    assert read_valid_rows(path) == [{"step": 0}, {"step": 2}]


def test_a_missing_file_has_no_rows_and_unicode_line_separators_do_not_end_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_valid_rows(path) == []
    with pytest.raises(FileNotFoundError):
        read_rows(path)
    path.write_text('{"text": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_rows(path) == [{"text": "a\u2028b\x85c"}]


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("torn", [b"", b'{"step": 2, "rew', b"\0\0\0", b'{"step": 2}'])
def test_an_incomplete_last_line_is_not_read_and_removed_on_request(tmp_path, torn, truncate):
    path, complete = tmp_path / "metrics.jsonl", b'{"step": 0}\n{"step": 1}\n'
    path.write_bytes(complete + torn)
    assert read_rows(path, truncate) == [{"step": 0}, {"step": 1}]
    assert path.read_bytes() == (complete if truncate else complete + torn)


@pytest.mark.parametrize("text", [None, "", "[]", '{"a": ', "[" * 100_000, "\xff"])
def test_a_file_that_is_not_an_object_is_named(tmp_path, text):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text, "latin-1")
    with pytest.raises(UserError, match=r"file\.json cannot be read: "):
        read_object(path)
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}
