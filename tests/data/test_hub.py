"""Tables: Parquet files and what ``datasets`` reads from a local folder."""

import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
from dataset_files import get_load_error, load, png, write_table
from PIL import Image

from vlm_grpo.data.hub import read_hub


def test_class_labels_are_read_by_name_and_asked_about_by_a_question_of_the_settings(tmp_path):
    rows = {"image": [Image.new("RGB", (8, 6))] * 2, "label": [1, 0]}
    labels = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    source = str(tmp_path / "saved")
    examples = load(source, "ocr", columns={"answer": "label"}, default_question="Cat or dog?")
    assert {e.question for e in examples} == {"Cat or dog?"}
    assert [e.answer for e in examples] == ["dog", "cat"]
    assert [e.location for e in examples] == [f"hf:{source} row {n}" for n in (1, 2)]
    assert "it has no question" in get_load_error(source, "ocr", columns={"answer": "label"})


def test_loading_writes_no_progress_bars_into_a_log(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.enable_progress_bars()
    (tmp_path / "train.jsonl").write_text('{"id": "a", "question": "q", "answer": "x"}\n')
    assert len(list(read_hub(str(tmp_path), "train"))) == 1
    assert capsys.readouterr().err == ""


def test_what_is_missing_in_a_dataset_is_named(tmp_path, monkeypatch):
    saved, path = tmp_path / "saved", tmp_path / "rows.parquet"
    rows = {"image": ["a.png"], "question": ["?"], "answer": [3]}
    datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)}).save_to_disk(str(saved))
    path.write_bytes(b"PAR1 and then nothing")
    for source, reason in (
        (f"hf:{saved}:nothing", f"its splits are test: write hf:{saved}:SPLIT"),
        (f"hf:{tmp_path / 'none'}", f"is {tmp_path / 'none'} its name on huggingface.co/datasets"),
        (f"hf:{saved}", f"image a.png is missing in {saved}"),  # relative to the dataset's folder
        (str(path), f"data file {path} cannot be read"),
    ):
        assert reason in get_load_error(source)
    features = datasets.Features({"image": datasets.Image(), "answer": datasets.Value("int64")})
    dataset = datasets.Dataset.from_dict({"image": ["a.png"], "answer": [3]}, features=features)
    monkeypatch.setattr(datasets.Dataset, "cast_column", lambda *_: 1 / 0)
    reason = "columns of the Dataset cannot be read: ZeroDivisionError"
    assert reason in get_load_error(dataset)


def open_table(tmp_path: Path, form: str) -> Any:
    images = [{"bytes": png(8 + n, 6), "path": None} for n in range(3)]
    rows = [
        {"image": image, "problem": "How many?", "solution": f"<answer> {n} </answer>"}
        for n, image in enumerate(images)
    ]
    if form in ("parquet", "shards"):
        for n in range(1 + (form == "shards")):
            write_table(tmp_path / f"train-{n}.parquet", rows)
        return str(tmp_path / f"train-{'*' if form == 'shards' else '0'}.parquet")
    dataset = datasets.Dataset.from_list(rows)
    if form == "lists":
        dataset = dataset.map(lambda row: {"image": [row["image"], row["image"]]})
    return dataset.cast_column("image", datasets.Image()) if form == "dataset" else dataset


@pytest.mark.parametrize("form", ["parquet", "shards", "dataset", "lists"])
def test_images_of_a_table_are_read_when_they_are_needed(tmp_path, form):
    examples = load(open_table(tmp_path, form))
    sizes = [image.load().size for example in examples for image in example.images]
    times = {"shards": [8, 9, 10, 8, 9, 10], "lists": [8, 8, 9, 9, 10, 10]}
    assert sizes == [(width, 6) for width in times.get(form, [8, 9, 10])]
    assert [e.answer for e in examples] == [0, 1, 2] * (1 + (form == "shards"))
    image = examples[1].images[0]
    assert not isinstance(image.data, bytes)
    sent = pickle.loads(pickle.dumps(image))  # as to a worker process
    assert sent.data == image.read_bytes() == png(9, 6)
