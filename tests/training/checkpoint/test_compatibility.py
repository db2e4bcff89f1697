"""Settings and training examples that a resumed run must not change are named with both values."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from small_runs import LORA, save_tiny_model, small_run

from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.training.checkpoint.compatibility import (
    check_same_data,
    check_same_settings,
    compute_digests,
    flatten_settings,
    warn_about_versions,
)
from vlm_grpo.training.trainer import train
from vlm_grpo.types import VideoRef
from vlm_grpo.utils.chat import Turn

EXAMPLES = make_shapes.draw_examples("counting", 6)


def make_settings(**changes: Any) -> Settings:
    return Settings.model_validate({"task": "counting", "data": {"train": "d.jsonl"}, **changes})


def get_error(before: Settings, after: Settings) -> str:
    with pytest.raises(UserError) as caught:
        check_same_settings(flatten_settings(before), after, "step-7")
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
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
def test_settings_that_determine_the_checkpoint_may_not_change(before, after, message):
    error = get_error(make_settings(**before), make_settings(**after))
    assert message in error
    assert "step-7 was written with other settings" in error
    assert "another name=" in error


def test_settings_that_are_marked_may_change():
    before = flatten_settings(make_settings())
    after = make_settings(
        name="other",
        resume=True,
        data={"train": "moved.jsonl", "curriculum": {}},
        optim={"lr": 1.0, "max_steps": 7, "schedule": "linear"},
        checkpoint={"every": 3},
        logging={"samples_every": 1},
        rollout={"temperature": 0.5},
        objective={"num_iterations": 2, "epsilon": 0.3},
    )
    check_same_settings(before, after, checkpoint="step-7")


def test_a_setting_that_an_older_version_did_not_have_may_have_any_value():
    saved = flatten_settings(make_settings())
    del saved["seed"]
    check_same_settings(saved, make_settings(), checkpoint="step-7")


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (EXAMPLES[:4], "6 of data.train=d.jsonl then, 4 of data.train=e.jsonl now; numbers 5 to 6"),
        ([*EXAMPLES[:5], EXAMPLES[0]], f"number 6, now {EXAMPLES[0].id!r}"),
        (EXAMPLES + EXAMPLES[:1], f"number 7, now {EXAMPLES[0].id!r}"),
        (
            [EXAMPLES[0], dataclasses.replace(EXAMPLES[1], answer=99), *EXAMPLES[2:]],
            f"number 2, now {EXAMPLES[1].id!r}",
        ),
        (
            [dataclasses.replace(EXAMPLES[0], history=(Turn("user", "a"),)), *EXAMPLES[1:]],
            f"number 1, now {EXAMPLES[0].id!r}",
        ),
    ],
    ids=["fewer", "another", "more", "another answer", "earlier turns"],
)
def test_the_first_training_example_that_differs_is_named(now, message):
    settings = make_settings(data={"train": "e.jsonl"})
    with pytest.raises(UserError) as caught:
        check_same_data(compute_digests(EXAMPLES), "d.jsonl", now, settings, "step-7")
    assert message in str(caught.value)
    check_same_data(compute_digests(EXAMPLES), "d.jsonl", list(EXAMPLES), settings, "step-7")


def test_an_image_is_compared_by_its_name_and_size_and_a_clip_by_its_times_too():
    image = EXAMPLES[0].images[0]
    clip = VideoRef(image.name, image.size, image.resized_size, path=Path("a.mp4"), times=(0, 1))
    images = [
        image,
        dataclasses.replace(image, name="other"),
        dataclasses.replace(image, size=(1, 1)),
        clip,
        dataclasses.replace(clip, times=(0, 2)),
    ]
    digests = compute_digests([dataclasses.replace(EXAMPLES[0], images=(i,)) for i in images])
    assert len(digests.unique(dim=0)) == 5


def test_other_versions_of_libraries_cause_a_warning(caplog):
    now = {"torch": "2", "peft": "1"}
    warn_about_versions(now, now)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        warn_about_versions({"torch": "1", "peft": "1"}, now)
    assert "torch 1 → 2" in caplog.text
    assert "peft" not in caplog.text


def test_a_run_is_checked_before_its_model_is_loaded(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    run = small_run(tmp_path, model, policy=LORA, optim={"max_steps": 1})
    train(run)
    again = run.model_copy(update={"resume": True, "model": "nowhere/at-all"})
    with pytest.raises(UserError, match='is now "nowhere/at-all"'):
        train(again)
    fewer = run.data.model_copy(update={"train_limit": 11})
    with pytest.raises(UserError, match=r"12 of data\.train=embedded:ocr then, 11 of"):
        train(run.model_copy(update={"resume": True, "data": fewer}))
