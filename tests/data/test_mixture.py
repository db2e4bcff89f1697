"""Mixtures: each example is asked, scored and drawn by the task of its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.data import load_run_task, load_split
from vlm_grpo.data.loading import Mixed
from vlm_grpo.errors import UserError
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example

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
