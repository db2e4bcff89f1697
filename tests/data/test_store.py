"""Examples on disk are those that were read, and memory holds only their positions."""

from __future__ import annotations

import gc
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pytest
from dataset_files import make_row, png, write_rows, write_table

from vlm_grpo.data import load_examples
from vlm_grpo.data.store import ExampleStore, ExampleView
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils.chat import Turn

COUNTING = load_task("counting")


def test_stored_examples_equal_those_that_were_added(tmp_path):
    (tmp_path / "a.png").write_bytes(png(8, 6))
    size = (8, 6)
    images = (
        ImageRef("a.png", size, size, tmp_path / "a.png"),
        ImageRef("b", size, size, data=png(8, 6)),
    )
    examples = [
        Example("a", images, "How many?", 3, {"level": [1, {"x": None}]}, "rows.jsonl:3"),
        Example("b", (), "Where?", {"boxes": [[1, 2.5, 3, 4]]}, history=(Turn("system", "Hi"),)),
    ]
    store = ExampleStore()
    for example in examples:
        store.append(example)
    store.flush()
    assert list(store) == examples
    assert (store[-1], store[:1], store[0].location) == (examples[1], examples[:1], "rows.jsonl:3")
    assert [image.load().size for image in store[0].images] == [size] * 2
    reverse = ExampleView(store, chosen=[1, 0])
    assert list(reverse) == reverse[:] == examples[::-1]
    with pytest.raises(IndexError):
        store[2]


def test_a_source_may_change_during_a_run(folder):
    source = write_rows(folder, make_row(id="a"), make_row(id="b"))
    examples = load_examples(source, COUNTING)
    Path(source).write_text("changed")
    assert [example.id for example in examples] == ["a", "b"]


def test_memory_per_row_is_a_position(tmp_path):
    rows = [make_row(id=f"row {n}", images=[], meta={"text": "x" * 200}) for n in range(3000)]
    source = write_rows(tmp_path, *rows)
    load_examples(source, COUNTING)  # what is made once
    gc.collect()
    tracemalloc.start()
    examples = load_examples(source, COUNTING)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(examples) == 3000
    assert kept / 3000 < 24  # a position has 8 bytes; the object of such an example over 1,000


def open_table(tmp_path: Path, form: str) -> Any:
    rows = [
        {"image": {"bytes": png(8 + n, 6), "path": None}, "question": "?", "answer": n}
        for n in range(3)
    ]
    if form == "shards":
        for n in range(2):
            write_table(tmp_path / f"train-{n}.parquet", rows)
        return str(tmp_path / "train-*.parquet")
    if form == "parquet":
        return str(write_table(tmp_path / "rows.parquet", rows))
    dataset = datasets.Dataset.from_list(rows)
    if form == "lists":
        dataset = dataset.map(lambda row: {"image": [row["image"], row["image"]]})
    return dataset.cast_column("image", datasets.Image()) if form == "dataset" else dataset


@pytest.mark.parametrize("form", ["parquet", "shards", "dataset", "lists"])
def test_images_of_a_table_are_read_when_they_are_needed(tmp_path, form):
    examples = load_examples(open_table(tmp_path, form), COUNTING)
    sizes = [image.load().size for example in examples for image in example.images]
    times = {"shards": [8, 9, 10, 8, 9, 10], "lists": [8, 8, 9, 9, 10, 10]}
    assert sizes == [(width, 6) for width in times.get(form, [8, 9, 10])]
    image = examples[1].images[0]
    assert not isinstance(image.data, bytes)
    sent = pickle.loads(pickle.dumps(image))  # as to a worker process
    assert sent.data == image.read_bytes() == png(9, 6)


def test_a_full_disk_is_named(monkeypatch):
    def write(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    store = ExampleStore()
    store.append(Example("a", (), "?", 1))
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(UserError, match=r"No space left on device; set TMPDIR to a folder"):
        store.flush()
    monkeypatch.undo()
    assert store[0].id == "a"


def test_examples_of_several_sources_follow_each_other():
    parts = [[Example(f"{name}{n}", (), "?", n, source=name) for n in range(3)] for name in "abc"]
    store = ExampleStore()
    for example in parts[1]:
        store.append(example)
    joined = ExampleView(parts[0], store, parts[2])
    assert list(joined) == [example for part in parts for example in part]
    assert joined[-1] == parts[2][2]
    assert joined[2:5] == [parts[0][2], *parts[1][:2]]
    with pytest.raises(IndexError):
        joined[9]
