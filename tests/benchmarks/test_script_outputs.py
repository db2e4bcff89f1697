"""Files for official scripts: their names, their content, and the folder as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo.benchmarks.script_outputs import name_files, write_files
from vlm_grpo.errors import UserError
from vlm_grpo.types import Example


def make_examples(*ids: str) -> list[Example]:
    return [Example(identity, (), "?", {"text": "a"}) for identity in ids]


def find_files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ("a.jpg", "a.md"),
        ("x.pdf_3.jpg", "x.pdf_3.md"),  # the last extension only
        ("images/a.png", "a.md"),  # the script takes the last part of the path too
        ("/etc/passwd", "passwd.md"),
        ("../../a.jpg", "a.md"),
        ("..", "...md"),  # a file, not a folder
        ("", ".md"),
        ("页 1.jpg", "页 1.md"),
    ],
)
def test_a_file_is_named_after_its_page_and_stays_in_the_folder(tmp_path, identity, name):
    folder = tmp_path / "pages"
    write_files("markdown", folder, make_examples(identity), ["text"])
    assert find_files(tmp_path) == [f"pages/{name}"]


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ("a.pdf-3", "a_pg3_repeat1.md"),
        ("scans/old/b_pg2.pdf-1", "scans/old/b_pg2_pg1_repeat1.md"),  # as in the benchmark
        ("c.d.pdf-12", "c.d_pg12_repeat1.md"),
        ("e.pdf", "e_pg1_repeat1.md"),
        ("f-3", "f-3_pg1_repeat1.md"),  # not a page of a PDF file
    ],
)
def test_a_file_is_named_after_its_pdf_and_page(tmp_path, identity, name):
    write_files("pages", tmp_path / "pages", make_examples(identity), ["text"])
    assert find_files(tmp_path) == [f"pages/{name}"]


@pytest.mark.parametrize(
    ("form", "ids", "problems"),
    [
        ("markdown", ["x/a.jpg", "b.jpg", "y/a.png"], ["and 'y/a.png' would both be 'a.md'"]),
        ("markdown", ["a" * 253 + ".jpg"], ["cannot be a file"]),  # 256 bytes with .md
        (
            "markdown",
            ["a\0b.jpg", "\ud83d.jpg"],
            [r"'a\x00b.jpg' cannot be a file", r"'\ud83d.jpg' cannot be"],
        ),
        ("pages", ["a.pdf-1", "a.pdf"], ["'a.pdf-1' and 'a.pdf' would both be 'a_pg1_repeat1.md'"]),
        ("pages", ["a//b", "a/./b"], ["'a//b' and 'a/./b' would both be 'a/b_pg1_repeat1.md'"]),
        ("pages", ["../a.pdf-1", "/a.pdf-1"], ["'../a.pdf-1' cannot be", "'/a.pdf-1' cannot be"]),
        ("pages", ["a" * 241 + "/b", "a" * 242], ["a' cannot be a file"]),
    ],
)
def test_all_bad_names_are_in_one_message(tmp_path, form, ids, problems):
    with pytest.raises(UserError) as error:
        write_files(form, tmp_path / "pages", make_examples(*ids), [""] * len(ids))
    assert all(problem in str(error.value) for problem in problems)
    assert not list(tmp_path.iterdir())


def test_the_longest_name_is_accepted():
    assert name_files("markdown", make_examples("a" * 252 + ".jpg")) == ["a" * 252 + ".md"]


def test_files_have_the_text_and_replace_the_folder(tmp_path):
    folder = tmp_path / "pages"
    write_files("markdown", folder, make_examples("old.jpg"), ["old"])
    texts = ["# Titel ü\r\n\n$$x$$\n", "", "\ud83d"]  # kept byte for byte; UTF-8 lacks the last
    write_files("markdown", folder, make_examples("a.jpg", "b.jpg", "c.jpg"), texts)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {"a.md": texts[0].encode(), "b.md": b"", "c.md": b"\\ud83d"}


def test_an_interrupted_write_leaves_no_part_of_a_folder(tmp_path):
    texts = ["a", None]  # the second raises
    with pytest.raises(AttributeError):
        write_files("markdown", tmp_path / "pages", make_examples("a.jpg", "b.jpg"), texts)  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())
