"""What a resumed run may change and what it may not, told with both values."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import LORA, save_tiny_model, small_run

from vlm_grpo.checkpoint.compatibility import (
    BY_ROWS,
    MAY_CHANGE,
    MAY_CHANGE_BETWEEN_STEPS,
    check_same_data,
    check_same_settings,
    plain_settings,
    row_digests,
    warn_of_other_versions,
)
from vlm_grpo.config.base import known_keys
from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.trainer import train

EXAMPLES = make_shapes.draw_examples("counting", 6)


def build(**changes: Any) -> Settings:
    return Settings.model_validate({"task": "counting", "data": {"train": "d.jsonl"}, **changes})


def refusal(before: Settings, after: Settings, in_a_step: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        check_same_settings(plain_settings(before), after, in_a_step, "step-7")
    return str(caught.value)


def test_every_name_of_the_lists_is_a_setting() -> None:
    names = [*MAY_CHANGE, *MAY_CHANGE_BETWEEN_STEPS, *BY_ROWS]
    assert set(names) <= set(known_keys(Settings))
    assert len(names) == len(set(names))
    guide = (Path(__file__).parents[2] / "docs/reliability.md").read_text("utf-8")
    rows = [row for row in guide.splitlines() if row.startswith(("| always", "| unless", "| as"))]
    told = [re.findall(r"`([a-z_.]+)`", row) for row in rows]
    assert told == [list(MAY_CHANGE), list(MAY_CHANGE_BETWEEN_STEPS), list(BY_ROWS)]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            {"policy": {"lora": {"r": 8}}},
            {"policy": {"lora": {"r": 16}}},
            "policy.lora.r was 8 and is now 16",
        ),
        (
            {"policy": {"lora": {"alpha": 8}}},
            {"policy": {"lora": {"alpha": 16}}},
            "policy.lora.alpha was 8 and is now 16",
        ),
        (
            {"policy": {"lora": {"target": "language"}}},
            {"policy": {"lora": {"target": ["q_proj"]}}},
            'policy.lora.target was "language" and is now ["q_proj"]',
        ),
        ({}, {"policy": {"lora": {}}}, "policy.lora.r was null and is now 64"),
        ({"policy": {"lora": {}}}, {}, "policy.lora.r was 64 and is now null"),
        ({}, {"model": "other"}, 'model was "embedded" and is now "other"'),
        ({}, {"task": "ocr"}, 'task was "counting" and is now "ocr"'),
        ({}, {"task_options": {"tags": True}}, "task_options.tags was null and is now true"),
        ({}, {"seed": 1}, "seed was 0 and is now 1"),
        ({}, {"policy": {"max_pixels": 9}}, "policy.max_pixels was null and is now 9"),
        (
            {"objective": {"beta": 0.1, "reference_refresh_every": 2}},
            {"objective": {"beta": 0.1, "reference_refresh_every": "never"}},
            'objective.reference_refresh_every was 2 and is now "never"',
        ),
        (
            {"objective": {"beta": 0.1, "reference_refresh_every": 2}},
            {"objective": {"beta": 0.0}},
            "objective.beta was 0.1 and is now 0.0",
        ),
    ],
)
def test_what_the_checkpoint_is_made_of_may_not_change(
    before: dict, after: dict, told: str
) -> None:
    message = refusal(build(**before), build(**after))
    assert told in message
    assert "step-7 was written with other settings" in message
    assert "another name=" in message


def test_what_the_lists_name_may_change() -> None:
    before = plain_settings(build())
    after = build(
        name="other",
        resume=True,
        data={"train": "moved.jsonl"},
        optim={"lr": 1.0, "max_steps": 7, "schedule": "linear"},
        checkpoint={"every": 3},
        logging={"samples_every": 1},
        rollout={"temperature": 0.5},
        objective={"num_iterations": 2, "epsilon": 0.3},
    )
    check_same_settings(before, after, in_a_step=False, checkpoint="step-7")
    message = refusal(build(), after, in_a_step=True)
    assert "rollout.temperature was 1.0 and is now 0.5 (it may change, but not in" in message
    assert "objective.num_iterations was 1 and is now 2 (it may" in message
    assert "optim.lr" not in message


def test_a_setting_that_the_older_program_did_not_know_is_no_difference() -> None:
    saved = plain_settings(build())
    del saved["seed"]
    check_same_settings(saved, build(), in_a_step=False, checkpoint="step-7")


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (EXAMPLES[:4], "6 of data.train=d.jsonl then, 4 of data.train=e.jsonl now; numbers 5 to 6"),
        ([*EXAMPLES[:5], EXAMPLES[0]], f"number 6, now {EXAMPLES[0].id!r}"),
        (EXAMPLES + EXAMPLES[:1], f"number 7, now {EXAMPLES[0].id!r}"),
        (
            [EXAMPLES[0], dataclasses.replace(EXAMPLES[1], answer=99), *EXAMPLES[2:]],
            f"number 2, now {EXAMPLES[1].id!r}",
        ),
    ],
    ids=["fewer", "another", "more", "another answer"],
)
def test_other_training_examples_are_told(now: list, told: str) -> None:
    settings = build(data={"train": "e.jsonl"})
    with pytest.raises(UserError) as caught:
        check_same_data(row_digests(EXAMPLES), "d.jsonl", now, settings, "step-7")
    assert told in str(caught.value)
    check_same_data(row_digests(EXAMPLES), "d.jsonl", list(EXAMPLES), settings, "step-7")


def test_other_versions_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    now = {"torch": "2", "peft": "1"}
    warn_of_other_versions(now, now)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        warn_of_other_versions({"torch": "1", "peft": "1"}, now)
    assert "torch 1 → 2" in caplog.text
    assert "peft" not in caplog.text


def test_a_run_is_refused_before_its_model_is_loaded(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    run = small_run(tmp_path, model, policy=LORA, optim={"max_steps": 1})
    train(run)
    again = run.model_copy(update={"resume": True, "model": "nowhere/at-all"})
    with pytest.raises(UserError, match='is now "nowhere/at-all"'):
        train(again)
    fewer = run.data.model_copy(update={"train_limit": 11})
    with pytest.raises(UserError, match=r"12 of data\.train=embedded:ocr then, 11 of"):
        train(run.model_copy(update={"resume": True, "data": fewer}))
