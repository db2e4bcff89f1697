"""Tables: parquet files and datasets with image columns, under any column names."""

from __future__ import annotations

import io

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from vlm_grpo.config.run import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.errors import UserError
from vlm_grpo.registry import load_task

COUNTING = load_task("counting")


def png(width: int = 8, height: int = 6) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


def refusal(source: str, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        load_examples(source, COUNTING, DataSettings.model_validate({"train": source, **settings}))
    return str(caught.value)


def test_a_parquet_table_with_image_bytes_and_other_names_is_read(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pa.table(
        {
            "image": [{"bytes": png(8, 6), "path": "x.png"}, {"bytes": png(4, 5), "path": None}],
            "problem": ["How many?", "And here?"],
            "solution": ["<answer> 3 </answer>", "4"],
            "level": [1, 2],
        }
    )
    pyarrow.parquet.write_table(table, path)

    first, second = load_examples(str(path), COUNTING)

    assert (first.id, first.answer, first.meta) == ("row-1", 3, {"level": 1})
    assert (first.images[0].size, second.images[0].size) == ((8, 6), (4, 5))
    assert second.images[0].load().size == (4, 5)


def test_columns_map_names_that_nobody_could_guess(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(
        pa.table({"uid": ["x"], "ask": ["How many?"], "n": [3], "png": [png()]}), path
    )
    columns = {"id": "uid", "question": "ask", "answer": "n", "images": "png"}
    settings = DataSettings.model_validate({"train": str(path), "columns": columns})

    (example,) = load_examples(str(path), COUNTING, settings)

    assert (example.id, example.question, example.answer) == ("x", "How many?", 3)
    assert "it has no asked" in refusal(str(path), columns={"question": "asked"})


def test_a_broken_parquet_file_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and then nothing")

    assert str(path) in refusal(str(path))


def test_a_datasets_source_with_image_columns_is_read_without_decoding(tmp_path):
    columns = {"image": datasets.Image(), "more": datasets.List(datasets.Image())}
    features = datasets.Features(
        {**columns, "question": datasets.Value("string"), "answer": datasets.Value("int64")}
    )
    rows = {
        "image": [Image.new("RGB", (8, 6))],
        "more": [[Image.new("RGB", (2, 2))]],
        "question": ["How many?"],
        "answer": [3],
    }
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "saved"))

    (example,) = load_examples(f"hf:{tmp_path / 'saved'}", COUNTING)

    assert example.images[0].load().size == (8, 6)
    assert example.meta["more"][0]["bytes"].startswith(b"\x89PNG")


def test_a_dataset_or_split_that_is_not_there_is_named(tmp_path):
    made = datasets.Dataset.from_dict({"question": ["?"], "answer": [3]})
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "saved"))

    assert "split nothing" in refusal(f"hf:{tmp_path / 'saved'}:nothing")
    assert str(tmp_path / "none") in refusal(f"hf:{tmp_path / 'none'}")


def test_a_path_in_a_table_needs_an_image_root(tmp_path):
    made = datasets.Dataset.from_dict({"image": ["a.png"], "question": ["?"], "answer": [3]})
    made.save_to_disk(str(tmp_path / "saved"))

    assert "image a.png is missing" in refusal(f"hf:{tmp_path / 'saved'}")
