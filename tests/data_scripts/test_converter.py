"""Tests of the command line shared by all converters: row checks, resuming, sampling, atomicity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dataset_files import png, write_files

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow


def make_converter(count: int, stop_after: int | None = None) -> Converter:
    """Return a converter of ``count`` rows that is interrupted after ``stop_after`` rows."""

    def read(request):
        for i in range(count):
            if i == stop_after:
                raise KeyboardInterrupt
            yield ConvertedRow(f"row-{i}", (png(shade=i),), "How many?", i)

    return Converter("rows", read, tasks=("counting",), splits=("test", "train"))


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
    assert "is already complete; nothing to do" in capsys.readouterr().out
    assert (tmp_path / "out" / "set.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize("change", [["--split", "train"], ["--limit", "2"], ["--seed", "3"]])
def test_an_output_of_another_command_is_an_error(argv, capsys, change):
    assert make_converter(3).main(argv) == 0
    assert make_converter(3).main([*argv, *change]) == 1
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
    def read(request):
        for i in range(40):
            image = None if i % 3 == 0 else png(shade=i)
            yield ConvertedRow(f"row-{i}", (image,), "How many?", i)

    converter = Converter("rows", read, tasks=("counting",), splits=("test",))
    assert converter.main([*argv, "--limit", "10"]) == 0
    assert len(read_rows(tmp_path)) == 10


def read_bad_rows(request):
    yield ConvertedRow("good", (png(),), "q", {"boxes": [[1, 2, 3, 4]], "labels": ["q"]})
    yield ConvertedRow("good", (png(),), "q", {"boxes": [[1, 2, 3, 4]], "labels": ["q"]})
    yield ConvertedRow(
        "rounded", (png(),), "q", {"boxes": [[-0.5, 0, 64.9, 48.2]], "labels": ["q"]}
    )
    yield ConvertedRow("xywh", (png(),), "q", {"boxes": [[30, 20, 70, 40]], "labels": ["q"]})
    yield ConvertedRow("reversed", (png(),), "q", {"boxes": [[30, 20, 10, 40]], "labels": ["q"]})
    yield ConvertedRow("two", (png(),), "q", {"boxes": [[1, 2, 3, 4]] * 2, "labels": ["q"] * 2})
    yield ConvertedRow("lost", (None,), "q", {"boxes": [[1, 2, 3, 4]], "labels": ["q"]})
    yield ConvertedRow("rotten", (b"no image",), "q", {"boxes": [[1, 2, 3, 4]], "labels": ["q"]})
    yield ConvertedRow(
        "outside", ("../secret.png",), "q", {"boxes": [[1, 2, 3, 4]], "labels": ["q"]}
    )
    yield RefusedRow("skipped", "it has no use")


def test_every_bad_row_is_refused_with_its_reason(tmp_path, argv, capsys):
    converter = Converter("rows", read_bad_rows, tasks=("grounding",), splits=("test",))
    assert converter.main(argv) == 0
    assert [row["id"] for row in read_rows(tmp_path)] == ["good", "rounded"]
    output = capsys.readouterr().out
    assert "rows read 10, written 2, refused 8" in output
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
        "skipped": "it has no use",
    }


def test_a_source_without_a_valid_row_gives_no_output(tmp_path, argv, capsys):
    def read(request):
        yield ConvertedRow("lost", (None,), "How many?", 1)

    converter = Converter("rows", read, tasks=("counting",), splits=("test",))
    assert converter.main(argv) == 1
    error = capsys.readouterr().err
    assert "no row of" in error
    assert "can be converted" in error
    assert "1 × its image is missing in the source" in error
    assert list((tmp_path / "out").iterdir()) == []


def test_a_layout_error_in_a_later_row_leaves_no_output(tmp_path, argv, capsys):
    def read(request):
        yield ConvertedRow("first", (png(),), "How many?", 1)
        yield ConvertedRow("second", (png(),), {}["question"], 1)

    converter = Converter("rows", read, tasks=("counting",), splits=("test",))
    assert converter.main(argv) == 1
    assert "does not have the published layout of this dataset (KeyError: 'question')" in (
        capsys.readouterr().err
    )
    assert list((tmp_path / "out").iterdir()) == []
    assert [path for path in (tmp_path / "images").rglob("*") if path.is_file()] == []


def test_out_must_be_jsonl(tmp_path, argv, capsys):
    assert make_converter(1).main([*argv[:-1], str(tmp_path / "set.json")]) == 1
    assert "must end in .jsonl" in capsys.readouterr().err


def test_image_paths_are_kept_and_no_image_is_copied(tmp_path, argv):
    def read(request):
        yield ConvertedRow("one", ("deep/a.png", "b.png"), "How many?", 1)

    write_files(tmp_path / "images", {"deep/a.png": png(), "b.png": png()})
    converter = Converter("rows", read, tasks=("counting",), splits=("test",))
    assert converter.main(argv) == 0
    assert read_rows(tmp_path)[0]["images"] == ["deep/a.png", "b.png"]
    assert len(list((tmp_path / "images").rglob("*.png"))) == 2
