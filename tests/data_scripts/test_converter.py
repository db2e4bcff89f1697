"""What all converters share: whole files or none, resuming, drawing, checks of every row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dataset_files import png, put

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow


def counting(count: int, stop_after: int | None = None) -> Converter:
    """A converter of ``count`` rows; it is interrupted after some, if asked."""

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


def rows_of(tmp_path: Path) -> list[dict]:
    text = (tmp_path / "out" / "set.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path, argv, capsys):
    assert counting(20).main(argv) == 0
    unbroken = (tmp_path / "out" / "set.jsonl").read_bytes()
    (tmp_path / "out" / "set.jsonl").unlink()

    assert counting(20, stop_after=9).main(argv) == 130
    assert not (tmp_path / "out" / "set.jsonl").exists()
    (part,) = (tmp_path / "out").glob(".set.jsonl.*.part")
    with part.open("ab") as file:  # a machine that stops may leave half a line
        file.write(b'{"id": "row-9", "ima')
    capsys.readouterr()
    assert counting(20).main(argv) == 0
    told = capsys.readouterr().out
    assert "going on after 9 rows" in told
    assert "rows read 20, written 20, refused 0" in told
    assert (tmp_path / "out" / "set.jsonl").read_bytes() == unbroken
    assert not list((tmp_path / "out").glob(".*")), "nothing is left aside"


def test_a_finished_output_is_left_alone(tmp_path, argv, capsys):
    assert counting(3).main(argv) == 0
    before = (tmp_path / "out" / "set.jsonl").stat().st_mtime_ns
    capsys.readouterr()
    assert counting(5).main(argv) == 0
    assert "finished already and is left alone" in capsys.readouterr().out
    assert (tmp_path / "out" / "set.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize("change", [["--split", "train"], ["--limit", "2"], ["--seed", "3"]])
def test_an_output_of_another_command_is_not_taken_for_its_own(argv, capsys, change):
    assert counting(3).main(argv) == 0
    assert counting(3).main([*argv, *change]) == 1
    assert "this command with this source did not make it" in capsys.readouterr().err


def test_limit_draws_by_the_seed(tmp_path, argv):
    drawn = {}
    for seed in ("1", "1", "2"):
        assert counting(100).main([*argv, "--limit", "10", "--seed", seed]) == 0
        names = [row["id"] for row in rows_of(tmp_path)]
        assert drawn.setdefault(seed, names) == names, "the same seed draws the same rows"
        (tmp_path / "out" / "set.jsonl").unlink()
    assert drawn["1"] != drawn["2"]
    assert all(len(names) == 10 for names in drawn.values())
    numbers = [int(name.removeprefix("row-")) for name in drawn["1"]]
    assert numbers == sorted(numbers), "drawn rows keep the source's order"
    assert max(numbers) > 50, "they are not just the first"


def test_limit_makes_up_for_bad_rows(tmp_path, argv):
    def read(request):
        for i in range(40):
            image = None if i % 3 == 0 else png(shade=i)
            yield ConvertedRow(f"row-{i}", (image,), "How many?", i)

    converter = Converter("rows", read, tasks=("counting",), splits=("test",))
    assert converter.main([*argv, "--limit", "10"]) == 0
    assert len(rows_of(tmp_path)) == 10


def bad_rows(request):
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
    yield RefusedRow("skipped", "it is of no use")


def test_every_bad_row_is_refused_with_its_reason(tmp_path, argv, capsys):
    converter = Converter("rows", bad_rows, tasks=("grounding",), splits=("test",))
    assert converter.main(argv) == 0
    assert [row["id"] for row in rows_of(tmp_path)] == ["good", "rounded"]
    told = capsys.readouterr().out
    assert "rows read 10, written 2, refused 8" in told
    summary = json.loads((tmp_path / "out" / "set.summary.json").read_text())
    # 64x48 pixels: "xywh" ends at 70, which is how a width taken for an edge shows.
    assert {row["id"]: row["reason"] for row in summary["refused"]} == {
        "good": "its id is used by an earlier row",
        "xywh": "a box leaves its image",
        "reversed": "a box is no box",
        "two": "the task does not accept its answer",
        "lost": "its image is missing in the source",
        "rotten": "its image cannot be used",
        "outside": "its image cannot be used",
        "skipped": "it is of no use",
    }


def test_a_source_in_which_no_row_is_good_gives_no_output(tmp_path, argv, capsys):
    def read(request):
        yield ConvertedRow("lost", (None,), "How many?", 1)

    converter = Converter("rows", read, tasks=("counting",), splits=("test",))
    assert converter.main(argv) == 1
    error = capsys.readouterr().err
    assert "gave no row to write" in error
    assert "1 × its image is missing in the source" in error
    assert list((tmp_path / "out").iterdir()) == []


def test_a_layout_that_breaks_in_the_middle_leaves_no_output(tmp_path, argv, capsys):
    def read(request):
        yield ConvertedRow("first", (png(),), "How many?", 1)
        yield ConvertedRow("second", (png(),), {}["question"], 1)

    converter = Converter("rows", read, tasks=("counting",), splits=("test",))
    assert converter.main(argv) == 1
    assert "not the published layout of this dataset (KeyError: 'question')" in (
        capsys.readouterr().err
    )
    assert list((tmp_path / "out").iterdir()) == []
    assert [path for path in (tmp_path / "images").rglob("*") if path.is_file()] == []


def test_out_must_be_jsonl(tmp_path, argv, capsys):
    assert counting(1).main([*argv[:-1], str(tmp_path / "set.json")]) == 1
    assert "must end in .jsonl" in capsys.readouterr().err


def test_paths_of_images_are_kept_and_nothing_is_copied(tmp_path, argv):
    def read(request):
        yield ConvertedRow("one", ("deep/a.png", "b.png"), "How many?", 1)

    put(tmp_path / "images", {"deep/a.png": png(), "b.png": png()})
    converter = Converter("rows", read, tasks=("counting",), splits=("test",))
    assert converter.main(argv) == 0
    assert rows_of(tmp_path)[0]["images"] == ["deep/a.png", "b.png"]
    assert len(list((tmp_path / "images").rglob("*.png"))) == 2
