"""Loading of sources: limits, embedded datasets, bad rows, and mixtures of sources with tasks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dataset_files import get_load_error, make_row, write_rows

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.data import load_examples, load_run_task, load_split
from vlm_grpo.data.loading import Mixed
from vlm_grpo.data_scripts import make_words
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.errors import UserError
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example

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


# Mixtures: each example is asked, scored and drawn by the task of its source.

COUNT = Example("count/a", (), "How many cups?", 3, source="count")
READ = Example("read/a", (), "Which word?", "exit", source="read")


@pytest.fixture
def mixed() -> Mixed:
    members = {"count": load_task("counting"), "read": load_task("ocr", tags=True)}
    return Mixed(members=members)


def build_settings(folder: Path, *rows: dict[str, Any], **source: Any) -> Settings:
    """Return settings with one list of sources: a file with the rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Settings(model="embedded", data={"train": [{"source": str(path), **source}]})


def test_each_example_has_the_task_of_its_source(mixed: Mixed) -> None:
    for example, name in ((COUNT, "count"), (READ, "read")):
        own = mixed.members[name]
        assert mixed.resolve(example) == (name, own)
        assert mixed.prompt(example) == own.prompt(example)
        assert mixed.gold(example) == own.gold(example)
        assert mixed.read(mixed.gold(example), example) == example.answer
        mixed.check(example)
    assert "<answer>" in mixed.prompt(READ)
    assert "<answer>" not in mixed.prompt(COUNT)
    template = PromptSettings(template="{{ source }}: {{ question }} {{ instruction }}")
    texts = [template.write_chat(example, mixed)[-1].text for example in (COUNT, READ)]
    instruction = mixed.members["read"].instructions(READ)
    assert texts == ["count: How many cups? ", f"read: Which word? {instruction}"]
    with pytest.raises(ValueError, match="source 'other' is none of count, read"):
        mixed.resolve(Example("x", (), "?", 1, source="other"))


def test_gold_answers_earn_what_their_own_task_says() -> None:
    class Rounded(type(load_task("counting"))):
        def gold_reward(self, example: Example) -> float:
            return 0.75

    mixed = Mixed(members={"count": Rounded(), "read": load_task("ocr")})
    assert [mixed.gold_reward(example) for example in (COUNT, READ)] == [0.75, 1.0]


def test_what_the_trainer_sets_reaches_every_task(mixed: Mixed) -> None:
    changed = load_task("grounding").frame, FRAMES["permille"]
    framed = Mixed(members=mixed.members, frame=changed[1], token_limit=7).with_progress(0.5)
    for task in framed.members.values():
        assert (task.frame, task.token_limit, task.progress) == (changed[1], 7, 0.5)


def test_names_of_rewards_begin_with_the_source(mixed: Mixed) -> None:
    assert mixed.reward_weights()["count/exact"] == 1.0
    assert {name.partition("/")[0] for name in mixed.reward_rules()} == {"count", "read"}
    assert mixed.reward_rules().keys() > mixed.reward_weights().keys()


def test_completions_are_scored_by_their_own_tasks(mixed: Mixed) -> None:
    examples = [READ, COUNT, READ, COUNT]
    texts = ["<answer>exit</answer>", "3", "exit", "4"]
    with RewardScorer() as scorer:
        scores = scorer(mixed, texts, examples)
        alone = [
            scorer(mixed.resolve(e)[1], [t], [e])[0] for t, e in zip(texts, examples, strict=True)
        ]
    assert [score.total for score in scores] == [score.total for score in alone]
    assert [score.total for score in scores] == [1.0, 1.0, 0.0, 0.0]
    assert scores[1].rewards["count/exact"] == 1.0
    assert all(name.startswith("read/") for name in (*scores[0].rewards, *scores[0].metrics))


def test_a_source_without_a_task_has_that_of_the_run_with_its_options() -> None:
    sources = [{"source": "embedded:counting", "task_options": {"thinking": True}}]
    task = load_run_task(
        Settings(task="counting", task_options={"tags": True}, data={"train": sources})
    )
    assert isinstance(task, Mixed)
    own = task.members["counting"]
    assert (own.tags, own.thinking) == (True, True)


def test_examples_carry_their_source(tmp_path: Path) -> None:
    row = {"id": "a", "question": "How many?", "answer": 3}
    settings = build_settings(tmp_path, row, task="counting", name="mine")
    (example,) = load_split(settings, load_run_task(settings), "train")
    assert (example.id, example.source) == ("mine/a", "mine")


ROWS = (
    {"question": "How many?", "answer": 3, "kind": "counting"},
    {"question": "Which word?", "answer": "exit", "kind": "ocr"},
)
BY_ROW = {"name": "mix", "columns": {"task": "kind"}, "tasks": {"counting": {}, "ocr": {}}}


def test_rows_may_name_their_tasks(tmp_path: Path) -> None:
    settings = build_settings(tmp_path, *ROWS, **BY_ROW)
    task = load_run_task(settings)
    examples = load_split(settings, task, "train")
    assert [e.source for e in examples] == ["mix/counting", "mix/ocr"]
    assert [type(task.resolve(e)[1]).__name__ for e in examples] == ["Counting", "OCR"]
    assert [dict(e.meta) for e in examples] == [{}, {}]
    assert settings.task_names == ("counting", "ocr")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROWS[0], "kind": "grounding"}, "rows.jsonl:2: its source 'grounding' is none of"),
        ({**ROWS[0], "kind": 3}, "rows.jsonl:2: its column kind must name its task"),
        ({"question": "?", "answer": 1}, "rows.jsonl:2: its column kind must name its task"),
        ({**ROWS[1], "kind": "counting"}, "rows.jsonl:2: the answer"),
    ],
)
def test_rows_that_name_no_known_task_are_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    settings = build_settings(tmp_path, ROWS[0], row, **BY_ROW)
    with pytest.raises(UserError) as caught:
        load_split(settings, load_run_task(settings), "train")
    assert message in str(caught.value)
