"""Tests of the command line shared by all converters: row checks, resuming, sampling, atomicity."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from dataset_files import png, write_files

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow


def build(read: Any, expected: Any = None, task: str = "counting") -> Converter:
    return Converter("rows", read, tasks=(task,), splits={"test": expected, "train": None})


def make_converter(count: int, stop_after: int | None = None) -> Converter:
    """Return a converter of ``count`` rows that is interrupted after ``stop_after`` rows."""

    def read(request):
        for i in range(count):
            if i == stop_after:
                raise KeyboardInterrupt
            yield ConvertedRow(f"row-{i}", (png(shade=i),), "How many?", i)

    return build(read)


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "source.json").write_text("[]")
    images, out = tmp_path / "images", tmp_path / "out" / "set.jsonl"
    return [
        "--source", str(tmp_path / "source.json"), "--images", str(images), "--out", str(out),
    ]  # fmt: skip


def read_rows(tmp_path: Path) -> list[dict]:
    text = (tmp_path / "out" / "set.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_resumed_run_writes_the_same_file(tmp_path, argv, capsys):
    assert make_converter(20).main(argv) == 0
    uninterrupted = (tmp_path / "out" / "set.jsonl").read_bytes()
    (tmp_path / "out" / "set.jsonl").unlink()
    assert make_converter(20, stop_after=9).main(argv) == 130
    assert not (tmp_path / "out" / "set.jsonl").exists()
    (part,) = (tmp_path / "out").glob(".set.jsonl.*.part")
    with part.open("ab") as file:  # a power loss may leave half a line
        file.write(b'{"id": "row-9", "ima')
    capsys.readouterr()
    assert make_converter(20).main(argv) == 0
    output = capsys.readouterr().out
    assert "resuming after 9 rows" in output
    assert "rows read 20, written 20, refused 0" in output
    assert (tmp_path / "out" / "set.jsonl").read_bytes() == uninterrupted
    assert not list((tmp_path / "out").glob(".*")), "no temporary file is left"


def test_a_complete_output_is_not_written_again(tmp_path, argv, capsys):
    assert make_converter(3).main(argv) == 0
    before = (tmp_path / "out" / "set.jsonl").stat().st_mtime_ns
    capsys.readouterr()
    assert make_converter(5).main(argv) == 0
    assert "is already written; nothing to do" in capsys.readouterr().out
    assert (tmp_path / "out" / "set.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "change", [["--split", "train"], ["--limit", "2"], ["--seed", "3"], ["--allow-partial"]]
)
def test_an_output_of_another_command_is_an_error(argv, capsys, change):
    assert make_converter(3).main(argv) == 0
    assert make_converter(3).main([*argv, *change]) == 2
    assert "was made by another command or from another source" in capsys.readouterr().err


def test_limit_samples_rows_by_the_seed(tmp_path, argv):
    sampled = {}
    for seed in ("1", "1", "2"):
        assert make_converter(100).main([*argv, "--limit", "10", "--seed", seed]) == 0
        names = [row["id"] for row in read_rows(tmp_path)]
        assert sampled.setdefault(seed, names) == names, "one seed, one sample"
        (tmp_path / "out" / "set.jsonl").unlink()
    assert sampled["1"] != sampled["2"]
    assert all(len(names) == 10 for names in sampled.values())
    numbers = [int(name.removeprefix("row-")) for name in sampled["1"]]
    assert numbers == sorted(numbers), "sampled rows keep the source's order"
    assert max(numbers) > 50, "the sample is not just the first rows"


def test_limit_replaces_bad_rows(tmp_path, argv):
    images = [None if i % 3 == 0 else png(shade=i) for i in range(40)]
    rows = [ConvertedRow(f"row-{i}", (im,), "How many?", i) for i, im in enumerate(images)]
    converter = build(lambda _: rows)
    assert converter.main([*argv, "--limit", "10"]) == 2, "a row of the sample has no image"
    assert converter.main([*argv, "--limit", "10", "--allow-partial"]) == 0
    assert len(read_rows(tmp_path)) == 10


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


def test_every_bad_row_is_refused_with_its_reason(tmp_path, argv, capsys):
    converter = build(read_bad_rows, task="grounding")
    assert converter.main([*argv, "--allow-partial"]) == 0
    assert [row["id"] for row in read_rows(tmp_path)] == ["good", "rounded"]
    output = capsys.readouterr().out
    assert "rows read 13, written 2, left out 1, refused 10" in output
    summary = json.loads((tmp_path / "out" / "set.summary.json").read_text())
    # The image is 64x48: "xywh" ends at x = 70, as a box does whose width was read as an edge.
    assert {row["id"]: row["reason"] for row in summary["refused"]} == {
        "good": "its id is used by an earlier row",
        "xywh": "a box extends beyond its image",
        "reversed": "a box is malformed",
        "two": "the task does not accept its answer",
        "lost": "its image is missing in the source",
        "rotten": "its image cannot be used",
        "outside": "its image cannot be used",
        "half a pair": "it cannot be written as JSON",
        "no number": "it cannot be written as JSON",
        "dated": "it cannot be written as JSON",
        "skipped": "it has no use",
    }


def test_a_source_without_a_valid_row_gives_no_output(tmp_path, argv, capsys):
    converter = build(lambda _: [ConvertedRow("lost", (None,), "How many?", 1)])
    assert converter.main(argv) == 2
    error = capsys.readouterr().err
    assert "no row of" in error
    assert "can be converted" in error
    assert "1 × its image is missing in the source" in error
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("question"), "not have the published layout of this dataset (KeyError: 'q"),
        (OverflowError("inf"), "not have the published layout of this dataset (OverflowError"),
        (OSError(36, "File name too long"), "source.json cannot be read: [Errno 36] File name"),
    ],
)
def test_an_error_in_a_later_row_leaves_no_output(tmp_path, argv, capsys, error, message):
    def read(request):
        yield ConvertedRow("first", (png(),), "How many?", 1)
        raise error

    converter = build(read)
    assert converter.main(argv) == 2
    assert message in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    assert [path for path in (tmp_path / "images").rglob("*") if path.is_file()] == []


def test_image_paths_are_kept_and_no_image_is_copied(tmp_path, argv):
    write_files(tmp_path / "images", {"deep/a.png": png(), "b.png": png()})
    converter = build(lambda _: [ConvertedRow("one", ("deep/a.png", "b.png"), "How many?", 1)])
    assert converter.main(argv) == 0
    assert read_rows(tmp_path)[0]["images"] == ["deep/a.png", "b.png"]
    assert len(list((tmp_path / "images").rglob("*.png"))) == 2


def make_short_converter(expected: Any, *, lost: int = 0, excluded: int = 0) -> Converter:
    """Return a converter of 7 good rows, lost rows and excluded rows."""
    rows = [ConvertedRow(f"row-{i}", (png(shade=i),), "How many?", i) for i in range(7)]
    rows += [ConvertedRow("row-0", (png(),), "How many?", 1)] * lost
    left_out = [RefusedRow(f"no-{i}", "no count", kind="excluded") for i in range(excluded)]
    return build(lambda _: [*rows, *left_out], expected)


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
def test_missing_rows_are_an_error_unless_allowed(tmp_path, argv, capsys, converter, problem):
    """The error names the numbers and leaves nothing; the option writes the rows and says so."""
    assert converter.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert f"source.json, split test: rows are missing: {problem}\n" in error
    assert ("× its id is used by an earlier row" in error) != problem.endswith("dropped 0")
    assert "--allow-partial" in error
    assert list((tmp_path / "out").iterdir()) == []
    assert [path for path in (tmp_path / "images").rglob("*") if path.is_file()] == []
    assert converter.main([*argv, "--allow-partial"]) == 0
    assert f"rows are missing: {problem}\n" in capsys.readouterr().out
    assert len(read_rows(tmp_path)) == 7
    summary = json.loads((tmp_path / "out" / "set.summary.json").read_text())
    assert summary["missing"].startswith(f"rows are missing: {problem}")


@pytest.mark.parametrize(
    "converter",
    [
        make_short_converter(7),
        make_short_converter(9, excluded=2),
        make_short_converter({"A": 8, "B": 7}),
        make_short_converter({"other.json": 8}),
        make_short_converter(None, excluded=1),
    ],
)
def test_a_complete_conversion_needs_no_option(tmp_path, argv, converter):
    assert converter.main(argv) == 0
    assert len(read_rows(tmp_path)) == 7
    summary = json.loads((tmp_path / "out" / "set.summary.json").read_text())
    assert (summary["missing"], summary["lost"]) == (None, 0)


BAD_PATHS = [
    ("--out", "file.jsonl/set.jsonl", "file.jsonl is not a folder"),
    ("--out", "file.jsonl/deep/set.jsonl", "Not a directory"),
    ("--out", "folder.jsonl", "is a folder: name a file in it"),
    ("--out", "locked/set.jsonl", "Permission denied"),
    ("--out", "set.json", "must end in .jsonl"),
    ("--images", "file.jsonl", "file.jsonl is not a folder"),
    ("--images", "nowhere", "nowhere is not a folder"),
    ("--source", "x" * 300, "File name too long"),
]


@pytest.mark.parametrize(("option", "value", "message"), BAD_PATHS)
def test_a_bad_path_is_one_message(tmp_path, argv, capsys, option, value, message):
    if "locked" in value and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    write_files(tmp_path, {"file.jsonl": "", "folder.jsonl/x": ""})
    (tmp_path / "locked").mkdir(mode=0o500)

    def read(request):
        request.path.exists()
        yield ConvertedRow("one", ("a.png",), "How many?", 1)

    converter = build(read)
    before = sorted(tmp_path.rglob("*"))
    path = value if option == "--source" else str(tmp_path / value)
    assert converter.main([*argv, option, path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert [
        path for path in sorted(tmp_path.rglob("*")) if path not in before and path.is_file()
    ] == []


def test_a_damaged_partial_file_is_one_message(tmp_path, argv, capsys):
    assert make_converter(20, stop_after=9).main(argv) == 130
    (part,) = (tmp_path / "out").glob(".set.jsonl.*.part")
    part.write_bytes(b"\x00\n" + part.read_bytes())
    assert make_converter(20).main(argv) == 2
    assert f"{part}:1 is not a JSON object" in capsys.readouterr().err
