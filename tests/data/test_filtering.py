"""The choice of training examples by their pass rates."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data.filtering import filter_examples
from vlm_grpo.data.run_data import load_data
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.checkpoint.compatibility import check_same_settings, flatten_settings
from vlm_grpo.types import Example

EXAMPLES = [Example(str(n), (), "?", 1, {"pass_rate": n / 10, "kind": "x"}) for n in range(11)]


def choose(text: str, difficulty: Path | None = None) -> list[str]:
    data = DataSettings(train="rows.jsonl", filter=text, difficulty=difficulty)
    return [example.id for example in filter_examples(EXAMPLES, data)[0]]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_column_of_the_rows_or_a_file_has_the_numbers(tmp_path: Path) -> None:
    assert choose("0.1 < pass_rate < 0.4") == ["2", "3"]
    rows = [{"id": str(n), "pass_rate": 1 - n / 10} for n in range(11)]
    assert choose("pass_rate >= 0.9", write(tmp_path / "d.jsonl", rows)) == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind > 0", r"(?s)example 0 has no number kind.*vlm-grpo difficulty RECIPE"),
        ("other > 0", "example 0 has no number other"),
        ("pass_rate > 1", "accepts none of the 11 training examples; .*pass_rate from 0 to 1"),
    ],
)
def test_examples_without_the_number_and_an_empty_choice_are_refused(
    text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        choose(text)


def test_a_file_that_is_none_of_difficulty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"d.jsonl:1 has no id"):
        choose("a > 0", write(tmp_path / "d.jsonl", [{"a": 1}]))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        choose("a > 0", tmp_path / "missing.jsonl")


def test_only_training_examples_are_chosen_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"How many {n}?", "answer": n, "pass_rate": n / 8} for n in range(9)]
    path = write(tmp_path / "rows.jsonl", rows)
    given = [f"data.train={path}", "data.eval=null", "data.eval_limit=null", "data.eval_share=0.3"]
    given += ["data.train_limit=null"]
    task = load_task("counting")
    train, held_out = load_data(load_settings("counting", given), task)
    filtered = load_settings("counting", [*given, "data.filter=pass_rate > 0.5"])
    with caplog.at_level(logging.INFO):
        chosen, same = load_data(filtered, task)
    assert list(same) == list(held_out)
    assert list(chosen) == [example for example in train if example.answer > 4]
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert f"keeps {len(chosen)} of {len(train)} training examples" in record.message
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO):
        load_data(filtered, task)
    assert not caplog.records  # one process says it


def test_a_resumed_run_refuses_another_filter() -> None:
    settings = load_settings("counting", ["data.filter=pass_rate > 0.5"])
    saved = flatten_settings(settings)
    check_same_settings(saved, settings, False, "step-1")
    for other in (["data.filter=pass_rate > 0.6"], []):
        with pytest.raises(UserError, match=r'data\.filter was "pass_rate > 0\.5" and is now'):
            check_same_settings(saved, load_settings("counting", other), False, "step-1")
    unfiltered = flatten_settings(load_settings("counting"))
    with pytest.raises(UserError, match=r"data\.filter was null"):
        check_same_settings(unfiltered, settings, False, "step-1")
