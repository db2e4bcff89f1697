"""Tests of the converter for any table of images, questions and answers."""

from __future__ import annotations

import datasets
from dataset_files import png, write_table


def test_a_table_is_read_by_its_usual_columns(convert, tmp_path):
    image = {"bytes": png(), "path": None}
    rows = [
        {"id": 7, "images": [image, image], "problem": "How many?", "solution": "3", "kind": "x"},
        {"id": 8, "images": [image], "problem": "How many?", "solution": "some", "kind": "x"},
    ]
    write_table(tmp_path / "hub" / "train-0.parquet", rows)
    result = convert("table", tmp_path / "hub", tmp_path / "images", task="counting")
    assert result.answers == {"train-7": 3}
    assert result.rows[0]["meta"] == {"kind": "x"}
    assert len(result.examples[0].images) == 2
    assert result.reasons == {"its answer is not valid for counting": 1}


def test_a_table_without_an_answer_column_is_an_error(convert_with_error, tmp_path):
    write_table(tmp_path / "train.parquet", [{"image": {"bytes": png()}, "question": "?"}])
    message = convert_with_error(
        "table", tmp_path / "train.parquet", tmp_path / "images", task="ocr"
    )
    assert "one column of answer, answers, solution, label; its columns are image, question" in (
        message
    )


def test_a_saved_dataset_is_read_by_name(convert, tmp_path):
    table = datasets.Dataset.from_dict(
        {"image": [png()], "question": ["What?"], "answer": ["EXIT"]}
    ).cast_column("image", datasets.Image())
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "saved"))
    result = convert("table", f"hf:{tmp_path / 'saved'}", tmp_path / "images", task="ocr")
    assert result.answers == {"train-0": "EXIT"}
