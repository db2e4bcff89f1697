"""Tests of the command line shared by all converters: row checks, resuming, sampling, atomicity."""

import json
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from dataset_files import png, write_files

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow


def build(read: Any, expected: Any = None, task: str = "counting") -> Converter:
    """Return a converter of rows, or of what a function yields."""
    rows: Any = read if callable(read) else lambda _: read
    return Converter("rows", rows, tasks=(task,), splits={"test": expected, "train": None})


def make_rows(count: int) -> list[ConvertedRow]:
    return [ConvertedRow(f"row-{i}", (png(shade=i),), "How many?", i) for i in range(count)]


def stop(rows: Sequence[ConvertedRow], error: BaseException) -> Converter:
    """Return a converter that fails after some rows."""

    def read(request):
        yield from rows
        raise error

    return build(read)


class Command:
    """A converter's command line in a folder, and what it has printed and written there."""

    def __init__(self, folder: Path, capsys: Any) -> None:
        self.folder, self.capsys, self.out = folder, capsys, folder / "out" / "set.jsonl"
        self.printed = self.error = ""
        write_files(folder, {"source.json": []})

    def __call__(self, converter: Converter, *more: str) -> int:
        paths = {"source": self.folder / "source.json", "images": self.folder / "images"}
        words = [f"--{name}={path}" for name, path in {**paths, "out": self.out}.items()]
        status = converter.main([*words, *more])
        self.printed, self.error = self.capsys.readouterr()
        return status

    def read_ids(self) -> list[str]:
        return [json.loads(line)["id"] for line in self.out.read_text().splitlines()]

    def read_summary(self) -> dict[str, Any]:
        return json.loads(self.out.with_suffix(".summary.json").read_text())

    def list_files(self) -> list[str]:
        """List all files but the source."""
        files = (path.name for path in self.folder.rglob("*") if path.is_file())
        return sorted({*files} - {"source.json"})

    def find_part(self) -> Path:
        (part,) = self.out.parent.glob(".set.jsonl.*.part")
        return part


command = pytest.fixture(lambda tmp_path, capsys: Command(tmp_path, capsys))


def test_a_resumed_run_writes_the_same_file(command):
    rows = make_rows(20)
    assert command(build(rows)) == 0
    uninterrupted = command.out.read_bytes()
    command.out.unlink()
    assert command(stop(rows[:9], KeyboardInterrupt())) == 130
    assert not command.out.exists()
    with command.find_part().open("ab") as file:  # a power loss may leave half a line
        file.write(b'{"id": "row-9", "ima')
    assert command(build(rows)) == 0
    assert "resuming after 9 rows" in command.printed
    assert "rows read 20, written 20, refused 0" in command.printed
    assert command.out.read_bytes() == uninterrupted
    assert not list(command.out.parent.glob(".*")), "no temporary file is left"


def test_a_complete_output_is_not_written_again_and_one_of_another_command_is_an_error(command):
    assert command(build(make_rows(3))) == 0
    before = command.out.stat().st_mtime_ns
    assert command(build(make_rows(5))) == 0
    assert "is already written; nothing to do" in command.printed
    assert command.out.stat().st_mtime_ns == before
    for change in ("--split=train", "--limit=2", "--seed=3", "--allow-partial"):
        assert command(build(make_rows(3)), change) == 2
        assert "was made by another command or from another source" in command.error


def test_limit_samples_rows_by_the_seed_and_replaces_bad_ones(command):
    converter, sampled = build(make_rows(100)), {}
    for seed in ("1", "1", "2"):
        assert command(converter, "--limit=10", f"--seed={seed}") == 0
        assert sampled.setdefault(seed, command.read_ids()) == command.read_ids()
        command.out.unlink()
    assert sampled["1"] != sampled["2"]
    assert all(len(names) == 10 for names in sampled.values())
    numbers = [int(name.removeprefix("row-")) for name in sampled["1"]]
    assert numbers == sorted(numbers), "sampled rows keep the source's order"
    assert max(numbers) > 50, "the sample is not just the first rows"
    images = [None if i % 3 == 0 else png(shade=i) for i in range(40)]
    converter = build([ConvertedRow(str(i), (im,), "?", i) for i, im in enumerate(images)])
    assert command(converter, "--limit=10") == 2, "a row of the sample has no image"
    assert command(converter, "--limit=10", "--allow-partial") == 0
    assert len(command.read_ids()) == 10


def read_bad_rows(request):
    def box(*edges: float) -> dict[str, Any]:
        return {"boxes": [list(edges)], "labels": ["q"]}

    good = box(1, 2, 3, 4)
    yield from (ConvertedRow("good", (png(),), "q", good) for _ in range(2))
    yield ConvertedRow("rounded", (png(),), "q", box(-0.5, 0, 64.9, 48.2))
    yield ConvertedRow("xywh", (png(),), "q", box(30, 20, 70, 40))
    yield ConvertedRow("reversed", (png(),), "q", box(30, 20, 10, 40))
    yield ConvertedRow("two", (png(),), "q", {"boxes": [[1, 2, 3, 4]] * 2, "labels": ["q"] * 2})
    yield ConvertedRow("lost", (None,), "q", good)
    yield ConvertedRow("rotten", (b"no image",), "q", good)
    yield ConvertedRow("outside", ("../secret.png",), "q", good)
    yield ConvertedRow("half a pair", (png(),), "\ud83d", good)
    yield ConvertedRow("no number", (png(),), "q", good, {"score": float("nan")})
    yield ConvertedRow("dated", (png(),), "q", good, {"day": date(2024, 1, 1)})
    yield RefusedRow("skipped", "it has no use", kind="excluded")


def test_every_bad_row_is_refused_with_its_reason(command):
    assert command(build(read_bad_rows, task="grounding"), "--allow-partial") == 0
    assert command.read_ids() == ["good", "rounded"]
    assert "rows read 13, written 2, left out 1, refused 10" in command.printed
    # The image is 64x48: "xywh" ends at x = 70, as a box does whose width was read as an edge.
    assert {row["id"]: row["reason"] for row in command.read_summary()["refused"]} == {
        "good": "its id is used by an earlier row",
        "xywh": "a box extends beyond its image",
        "reversed": "a box is malformed",
        "two": "the task does not accept its answer",
        "lost": "its image is missing in the source",
        **dict.fromkeys(("rotten", "outside"), "its image cannot be used"),
        **dict.fromkeys(("half a pair", "no number", "dated"), "it cannot be written as JSON"),
        "skipped": "it has no use",
    }


def test_a_source_without_a_valid_row_gives_no_output(command):
    assert command(build([ConvertedRow("lost", (None,), "How many?", 1)])) == 2
    assert "source.json can be converted\n" in command.error
    assert "1 × its image is missing in the source" in command.error
    assert command.list_files() == []


def test_an_error_in_a_later_row_leaves_no_output(command):
    for error, message in (
        (KeyError("question"), "not have the published layout of this dataset (KeyError: 'q"),
        (OverflowError("inf"), "not have the published layout of this dataset (OverflowError"),
        (OSError(36, "File name too long"), "source.json cannot be read: [Errno 36] File name"),
    ):
        assert command(stop(make_rows(1), error)) == 2
        assert message in command.error
        assert command.list_files() == []


def test_image_paths_are_kept_and_no_image_is_copied(command, tmp_path):
    write_files(tmp_path / "images", {"deep/a.png": png(), "b.png": png()})
    images = "deep/a.png", "b.png"
    assert command(build([ConvertedRow("one", images, "How many?", 1)])) == 0
    assert json.loads(command.out.read_text())["images"] == [*images]
    assert command.list_files() == ["a.png", "b.png", "set.jsonl", "set.summary.json"]


def make_short_converter(expected: Any, *, lost: int = 0, excluded: int = 0) -> Converter:
    """Return a converter of 7 good rows, lost rows and excluded rows."""
    lost_rows = [ConvertedRow("row-0", (png(),), "How many?", 1)] * lost
    left_out = [RefusedRow(f"no-{i}", "no count", kind="excluded") for i in range(excluded)]
    return build([*make_rows(7), *lost_rows, *left_out], expected)


@pytest.mark.parametrize(
    ("converter", "problem"),
    [
        (make_short_converter(8), "expected 8 (test), found 7, dropped 0"),
        (make_short_converter(6), "expected 6 (test), found 7, dropped 0"),
        (make_short_converter(7, excluded=1), "expected 7 (test), found 8, dropped 0"),
        (make_short_converter(9, lost=2), "expected 9 (test), found 9, dropped 2"),
        (make_short_converter(None, lost=1), "expected every row, found 8, dropped 1"),
        (make_short_converter({"A": 8, "B": 9}), "expected 8 (A) or 9 (B), found 7, dropped 0"),
        (make_short_converter({"source.json": 8}), "expected 8 (source.json), found 7, dropped 0"),
    ],
)
def test_missing_rows_are_an_error_unless_allowed(command, converter, problem):
    """The error names the numbers and leaves nothing; the option writes the rows and says so."""
    assert command(converter) == 2
    assert command.error.startswith("error: ")
    assert f"source.json, split test: rows are missing: {problem}\n" in command.error
    assert ("× its id is used by an earlier row" in command.error) != problem.endswith("dropped 0")
    assert "--allow-partial" in command.error
    assert command.list_files() == []
    assert command(converter, "--allow-partial") == 0
    assert f"rows are missing: {problem}\n" in command.printed
    assert len(command.read_ids()) == 7
    assert command.read_summary()["missing"].startswith(f"rows are missing: {problem}")


def test_a_complete_conversion_needs_no_option(command):
    for converter in (
        *(make_short_converter(9, excluded=2), make_short_converter({"A": 8, "B": 7})),
        *(make_short_converter({"other.json": 8}), make_short_converter(None, excluded=1)),
    ):
        assert command(converter) == 0
        assert len(command.read_ids()) == 7
        summary = command.read_summary()
        assert (summary["missing"], summary["lost"]) == (None, 0)
        command.out.unlink()


@pytest.mark.parametrize(
    "is_locked",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
        ),
    ],
)
def test_a_bad_path_is_one_message(tmp_path, command, is_locked):
    def read(request):
        request.path.exists()
        yield ConvertedRow("one", ("a.png",), "How many?", 1)

    write_files(tmp_path, {"file.jsonl": "", "folder.jsonl/x": ""})
    (tmp_path / "locked").mkdir(mode=0o500)
    before = command.list_files()
    for option, value, message in (
        ("--out", "file.jsonl/set.jsonl", "file.jsonl is not a folder"),
        ("--out", "file.jsonl/deep/set.jsonl", "Not a directory"),
        ("--out", "folder.jsonl", "is a folder: name a file in it"),
        ("--out", "locked/set.jsonl", "Permission denied"),
        ("--out", "set.json", "must end in .jsonl"),
        ("--images", "file.jsonl", "file.jsonl is not a folder"),
        ("--images", "nowhere", "nowhere is not a folder"),
        ("--source", "x" * 300, "File name too long"),
    ):
        if is_locked != ("locked" in value):
            continue
        assert command(build(read), option, str(tmp_path / value)) == 2
        assert command.error.startswith("error: ")
        assert command.error.count("\n") == 1
        assert message in command.error
        assert command.list_files() == before


def test_a_damaged_partial_file_is_one_message(command):
    assert command(stop(make_rows(9), KeyboardInterrupt())) == 130
    part = command.find_part()
    part.write_bytes(b"\x00\n" + part.read_bytes())
    assert command(build(make_rows(20))) == 2
    assert f"{part}:1 is not a JSON object" in command.error
