"""A run is checked against the checkpoint that it resumes from."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import LORA

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.checkpoint import resume
from vlm_grpo.training.checkpoint.resume import check_same_settings, flatten_settings
from vlm_grpo.training.trainer import train
from vlm_grpo.types import VideoRef
from vlm_grpo.utils.chat import Turn

FIRST, SECOND, *_ = EXAMPLES = make_shapes.draw_examples("counting", 6)
TALKED = replace(FIRST, history=(Turn("user", "a"),))
COUNTING = load_task("counting")


def make_settings(**changes: Any) -> Settings:
    return Settings.model_validate({"task": "counting", "data": {"train": "d.jsonl"}, **changes})


@pytest.mark.parametrize(
    ("name", "before", "after", "message"),
    [
        ("policy.lora.target", "language", "[q_proj]", '"language" and is now ["q_proj"]'),
        ("policy.lora.r", "", "64", "null and is now 64"),
        ("warm_start.steps", "2", "1", "2 and is now 1"),
        ("model", "", "other", '"embedded" and is now "other"'),
        ("task_options.tags", "", "true", "null and is now true"),
        ("objective.reference_refresh_every", "2", "never", '2 and is now "never"'),
    ],
)
def test_settings_that_determine_the_checkpoint_may_not_change(name, before, after, message):
    first, later = (
        load_settings("quickstart", ["objective.beta=0.1", *[f"{name}={value}"] * bool(value)])
        for value in (before, after)
    )
    with pytest.raises(UserError) as caught:
        check_same_settings(flatten_settings(first), later, "step-7", COUNTING)
    parts = f"{name} was {message}", "step-7 was written with other settings", "another name="
    for part in parts:
        assert part in str(caught.value)


def test_settings_that_are_marked_may_change():
    before = flatten_settings(make_settings(warm_start={"steps": 2}))
    changes: dict[str, Any] = {"name": "other", "warm_start": {"steps": 2, "lr": 1e-3}}
    changes |= {"data": {"train": "moved.jsonl", "curriculum": {}}, "checkpoint": {"every": 3}}
    changes |= {"optim": {"lr": 1.0, "max_steps": 7, "schedule": "linear"}, "resume": True}
    changes |= {"logging": {"samples_every": 1}, "rollout": {"temperature": 0.5}}
    changes |= {"objective": {"num_iterations": 2, "epsilon": 0.3}}
    check_same_settings(before, make_settings(**changes), "step-7", COUNTING)
    first, later = (make_settings(task_options={"address": {"port": port}}) for port in (1, 2))
    task: Any = SimpleNamespace(may_change=("address",))
    check_same_settings(flatten_settings(first), later, "step-7", task)


def test_a_setting_of_other_versions_alone_may_have_any_value_if_it_has_no_effect():
    saved = flatten_settings(make_settings()) | {"checkpoint.asynchronous": True}
    del saved["seed"]  # as if an older version did not have it
    check_same_settings(saved, make_settings(), "step-7", COUNTING)
    saved["policy.other"] = ["vision"]
    with pytest.raises(UserError, match=r'other was \["vision"\] and is now null'):
        check_same_settings(saved, make_settings(), "step-7", COUNTING)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (EXAMPLES[:4], "6 of data.train=d.jsonl then, 4 of data.train=e.jsonl now; numbers 5 to 6"),
        ([*EXAMPLES[:5], FIRST], f"number 6, now {FIRST.id!r}"),
        ([*EXAMPLES, FIRST], f"number 7, now {FIRST.id!r}"),
        ([FIRST, replace(SECOND, answer=99), *EXAMPLES[2:]], f"number 2, now {SECOND.id!r}"),
        ([TALKED, *EXAMPLES[1:]], f"number 1, now {FIRST.id!r}"),
    ],
)
def test_the_first_training_example_that_differs_is_named(now, message):
    saved, settings = resume.compute_digests(EXAMPLES), make_settings(data={"train": "e.jsonl"})
    with pytest.raises(UserError) as caught:
        resume.check_same_data(saved, "d.jsonl", now, settings, "step-7")
    assert message in str(caught.value)
    resume.check_same_data(saved, "d.jsonl", list(EXAMPLES), settings, "step-7")


def test_an_image_is_compared_by_its_name_and_size_and_a_clip_by_its_times_too():
    image = FIRST.images[0]
    clip = VideoRef(image.name, image.size, image.resized_size, path=Path("a.mp4"), times=(0, 1))
    images = [image, replace(image, name="other"), replace(image, size=(1, 1))]
    images += [clip, replace(clip, times=(0, 2))]
    digests = resume.compute_digests([replace(FIRST, images=(own,)) for own in images])
    assert len(digests.unique(dim=0)) == 5


def test_other_versions_of_libraries_cause_a_warning(caplog):
    now = {"torch": "2", "peft": "1"}
    resume.warn_about_versions(now, now)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        resume.warn_about_versions({"torch": "1", "peft": "1"}, now)
    assert "torch 1 → 2" in caplog.text
    assert "peft" not in caplog.text


def test_a_run_is_checked_before_its_model_is_loaded(settings):
    run = settings(policy=LORA, optim={"max_steps": 1})
    train(run)
    again = run.model_copy(update={"resume": True, "model": "nowhere/at-all"})
    with pytest.raises(UserError, match='is now "nowhere/at-all"'):
        train(again)
    fewer = run.data.model_copy(update={"train_limit": 11})
    with pytest.raises(UserError, match=r"12 of data\.train=embedded:ocr then, 11 of"):
        train(run.model_copy(update={"resume": True, "data": fewer}))
