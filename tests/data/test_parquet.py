"""Parquet files with image columns, under any column names."""

from __future__ import annotations

from pathlib import Path

from dataset_files import get_load_error, png, write_table

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.data.hub import read_parquet
from vlm_grpo.task.registry import load_task

COUNTING = load_task("counting")


def test_a_table_with_image_bytes_and_other_column_names_is_read(tmp_path: Path):
    image, problem, solution = "image", "problem", "solution"
    path = write_table(
        tmp_path / "rows.parquet",
        [
            {
                image: {"bytes": png(8, 6), "path": "x.png"},
                problem: "How many?",
                solution: "<answer> 3 </answer>",
                "level": 1,
            },
            {
                image: {"bytes": png(4, 5), "path": None},
                problem: "And here?",
                solution: "4",
                "level": 2,
            },
        ],
    )

    first, second = load_examples(str(path), COUNTING)

    assert (first.id, first.answer, first.meta) == ("row-1", 3, {"level": 1})
    assert (first.images[0].size, second.images[0].size) == ((8, 6), (4, 5))
    assert second.images[0].load().size == (4, 5)


def test_columns_are_mapped_by_the_settings(tmp_path: Path):
    rows = [{"uid": "x", "ask": "How many?", "n": 3, "png": png(8, 6)}]
    path = write_table(tmp_path / "rows.parquet", rows)
    columns = {"id": "uid", "question": "ask", "answer": "n", "images": "png"}
    settings = DataSettings.model_validate({"train": str(path), "columns": columns})

    (example,) = load_examples(str(path), COUNTING, settings)

    assert (example.id, example.question, example.answer) == ("x", "How many?", 3)
    assert "it has no asked" in get_load_error(str(path), columns={"question": "asked"})


def test_rows_are_numbered_across_batches(tmp_path: Path):
    path = write_table(tmp_path / "rows.parquet", [{"n": n} for n in range(130)])  # batches of 64

    rows = list(read_parquet(path))

    assert [row.values["n"] for row in rows] == list(range(130))
    assert [(row.location, row.number) for row in rows][64] == (f"{path} row 65", 65)
    assert not rows[0].strict


def test_a_broken_file_is_named(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and then nothing")

    assert f"data file {path} cannot be read" in get_load_error(str(path))


def test_a_bad_row_after_the_first_batch_is_named_by_its_number(tmp_path: Path):
    rows = [{"question": "How many?", "answer": n if n != 99 else -1} for n in range(130)]
    path = write_table(tmp_path / "rows.parquet", rows)

    message = get_load_error(str(path))

    assert "1 bad row (good rows: 129)" in message
    assert f"{path} row 100: the answer -1 must be" in message
    examples = load_examples(str(path), COUNTING, DataSettings(train=str(path), on_bad_row="skip"))
    assert [examples[99].id, examples[99].name] == ["row-101", f"{path} row 101: example row-101"]
