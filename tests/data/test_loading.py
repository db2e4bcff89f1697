"""Loading of sources: limits, embedded datasets, and the treatment of bad rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dataset_files import get_load_error, make_row, write_rows

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.data_scripts import make_words
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task

COUNTING = load_task("counting")


def test_written_examples_are_loaded_unchanged(tmp_path: Path):
    written = make_words.draw_examples("ocr", 3, seed=5)
    path = write_examples(written, tmp_path / "words", "ocr.jsonl")

    loaded = load_examples(str(path), load_task("ocr"))

    assert [(e.id, e.question, e.answer, dict(e.meta)) for e in loaded] == [
        (e.id, e.question, e.answer, dict(e.meta)) for e in written
    ]
    assert loaded[0].images[0].load().tobytes() == written[0].images[0].load().tobytes()


@pytest.mark.parametrize(
    ("name", "task_name"),
    [
        *[("counting", "counting"), ("grounding", "grounding"), ("ocr", "ocr"), ("words", "ocr")],
        *[("attributes:hard", "counting"), ("relations:hard,noise=0", "grounding")],
    ],
)
def test_embedded_data_suits_its_task_and_its_splits_share_no_image(name: str, task_name: str):
    source, task = f"embedded:{name}", load_task(task_name)
    settings = DataSettings(train=source, eval=source, train_limit=40, eval_limit=30)

    train = load_examples(source, task, settings, "train")
    held_out = load_examples(source, task, settings, "eval")

    assert (len(train), len(held_out)) == (40, 30)
    assert not {e.images[0].data for e in train} & {e.images[0].data for e in held_out}


def test_embedded_data_of_another_task_is_refused():
    assert "does not fit Counting" in get_load_error("embedded:ocr")
    assert "did you mean counting?" in get_load_error("embedded:countin")
    assert "did you mean relations?" in get_load_error("embedded:relation:hard")
    assert "did you mean occlusion?" in get_load_error("embedded:relations:oclusion=0.3")
    assert "embedded:counting has no dials" in get_load_error("embedded:counting:hard")


def test_a_folder_of_an_unknown_user_is_a_missing_file():
    message = get_load_error("~no-such-user/rows.jsonl")
    assert message == "there is no data file ~no-such-user/rows.jsonl"
    with pytest.raises(UserError, match=r"there is no task file ~no-such-user/task\.py"):
        load_task("~no-such-user/task.py")


def test_a_limit_keeps_the_first_good_rows(folder: Path):
    source = write_rows(folder, *[make_row(id=i) for i in range(5)])
    settings = DataSettings(train=source, train_limit=2)

    assert [e.id for e in load_examples(source, COUNTING, settings, "train")] == ["0", "1"]
    assert len(load_examples(source, COUNTING, settings, "eval")) == 5


def test_an_example_names_the_line_that_it_was_read_from(folder: Path):
    source = write_rows(folder, "", make_row())

    (example,) = load_examples(source, COUNTING)

    assert example.name == f"{source}:2: example a"
    assert example == replace(example, location="")  # the location is for messages only


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (lambda self, example: example.meta["hint"], "KeyError: 'hint'"),
        (lambda self, example: example.meta.get("hint"), "TypeError: question returned None, not"),
    ],
    ids=["raises", "returns None"],
)
def test_a_row_whose_prompt_the_task_cannot_write_is_a_bad_row(
    folder: Path, question: Callable, reason: str
):
    task = type("Hinted", (type(COUNTING),), {"question": question})()
    source = write_rows(folder, make_row(id="good", meta={"hint": "Look!"}), make_row())

    with pytest.raises(UserError) as caught:
        load_examples(source, task)

    assert f"{source}:2: the task cannot write its prompt: {reason}" in str(caught.value)
    assert "1 bad row (good rows: 1)" in str(caught.value)


def test_all_bad_rows_are_reported_together_in_a_list_of_limited_length(folder: Path):
    source = write_rows(folder, *[make_row(id=i, answer="x") for i in range(60)])
    message = get_load_error(source)

    assert "60 bad rows (good rows: 0)" in message
    assert f"{source}:50: " in message
    assert f"{source}:51: " not in message
    assert "… and 10 more" in message


def test_a_duplicate_id_is_reported_with_both_lines(folder: Path):
    source = write_rows(folder, make_row(id=1), make_row(id="1"))

    assert f"{source}:2: id '1' is a duplicate of {source}:1" in get_load_error(source)


def test_skipping_keeps_the_good_rows_and_logs_the_others(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    source = write_rows(folder, make_row(id=1), make_row(id=2, answer="x"), make_row(id=3))
    with caplog.at_level(logging.WARNING):
        examples = load_examples(source, COUNTING, DataSettings(train=source, on_bad_row="skip"))

    assert [e.id for e in examples] == ["1", "3"]
    assert "skipped 1 bad row, kept 2" in caplog.text
    assert f"{source}:2: the answer 'x'" in caplog.text


def test_skipping_all_rows_is_an_error(folder: Path):
    source = write_rows(folder, make_row(answer="x"))

    for on_bad_row in ("skip", "error"):
        message = get_load_error(source, on_bad_row=on_bad_row)
        assert "1 bad row (good rows: 0)" in message
        assert "on_bad_row" not in message  # no good row would be left
    assert "on_bad_row=skip" in get_load_error(write_rows(folder, make_row(answer="x"), make_row()))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("none.jsonl", "there is no data file none.jsonl"),
        ("rows.txt", "rows.txt is not a data source"),
        ("none.csv", "there is no data file none.csv"),
        ("none.parquet", "there is no data file none.parquet"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(source: str, reason: str):
    assert reason in get_load_error(source)
