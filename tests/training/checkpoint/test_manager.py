"""The state of a run is saved in a checkpoint and restored, weight by weight."""

import json
import logging
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import LORA, assert_same_run, load_weights, make_trainer

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.checkpoint.manager import get_rng_states
from vlm_grpo.training.checkpoint.resume import (
    check_same_data,
    check_same_settings,
    compute_digests,
    flatten_settings,
    warn_about_versions,
)
from vlm_grpo.training.trainer import train
from vlm_grpo.types import VideoRef
from vlm_grpo.utils.chat import Turn

STATE = "model.language_model.layers.0.mlp.up_proj.weight/state1"
ONE_STEP: Any = {"optim": {"max_steps": 1}, "rollout": {"max_completion_length": 2}}


@pytest.mark.parametrize(
    ("policy", "file", "message"),
    [({}, "model", "q_proj"), (LORA, "adapter_model", "weights of the model")],
    ids=["full", "adapter"],
)
def test_weights_are_restored_and_a_renamed_one_is_an_error(settings, policy, file, message):
    trainer = make_trainer(settings(policy=policy, **ONE_STEP))
    checkpoint = trainer.run().checkpoint
    trained = dict(trainer.policy.trainable_parameters())
    found, initial = (
        dict(load_policy(trainer.settings, path).trainable_parameters())
        for path in (checkpoint, None)
    )
    assert found.keys() == trained.keys()
    assert [name for name in trained if not torch.equal(found[name], trained[name])] == []
    # If nothing had been loaded, they would equal the initial model.
    assert any(not torch.equal(found[name], initial[name]) for name in found)
    weights = load_weights(checkpoint)
    assert len(weights) == len(found)  # those of the adapter only
    name = next(name for name in weights if "q_proj" in name)
    weights[name.replace("q_proj", "query_proj")] = weights.pop(name)
    save_file(weights, checkpoint / f"{file}.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=message):
        load_policy(trainer.settings, checkpoint)


def test_bfloat16_weights_with_8_bit_moments_resume_bit_for_bit(settings):
    """The steps of every optimizer are compared in ``tests/dist/test_optimizer.py``."""
    optim = {"name": "adamw_8bit", "lr": 1e-3, "lr_vision": 1e-4}
    changes: Any = {"policy": {"dtype": "bfloat16", "master_weights": "bfloat16"}, "optim": optim}
    changes["checkpoint"] = {"every": 2, "keep_last": 0}
    whole = settings(name="whole", **changes)
    checkpoint = train(whole).checkpoint
    assert {weight.dtype for weight in load_weights(checkpoint).values()} == {torch.bfloat16}
    assert load_file(checkpoint / "optimizer.safetensors")[STATE].dtype == torch.uint8
    resumed = settings(name="resumed", resume=True, **changes)
    shutil.copytree(whole.run_dir, resumed.run_dir)
    shutil.rmtree(resumed.run_dir / "checkpoints" / "step-4")
    train(resumed)
    assert_same_run(whole.run_dir, resumed.run_dir)
    with pytest.raises(UserError, match=r'optim.name was "adamw_8bit" and is now "adamw"'):
        train(settings(**{**changes, "name": "resumed", "resume": True, "optim": {}}))


@pytest.mark.parametrize("policy", [{}, LORA])
def test_a_disk_without_room_for_a_checkpoint_ends_a_run_before_it_begins(
    settings, policy, monkeypatch, caplog
):
    reference = {"beta": 0.1, "reference_refresh_every": 2}
    run = settings(policy=policy, objective=reference, **ONE_STEP)
    trainer, free = make_trainer(run), [1]
    usage = "vlm_grpo.training.checkpoint.manager.shutil.disk_usage"
    monkeypatch.setattr(usage, lambda _: SimpleNamespace(free=free[0]))
    with pytest.raises(UserError, match=r"takes about .* GB, and the disk of .* make room, or set"):
        trainer.run()
    assert not run.run_dir.exists()
    estimate = trainer.checkpoints._estimate_bytes()  # noqa: SLF001
    for number, is_warned in ((3, False), (2, True)):  # keep_last=2, and the one being written
        free[0] = number * estimate
        trainer.checkpoints.check_disk()
        assert ("less than the 3 that checkpoint.keep_last=2 needs" in caplog.text) == is_warned
    folder = trainer.run().checkpoint
    files = [file for file in folder.glob("*.safetensors") if file.stem != "examples"]
    assert len(files) == 3  # weights, optimizer and reference, whose headers are not counted
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert estimate == sum(file.stat().st_size for file in files) - headers


def test_each_rank_and_each_budget_gets_its_own_state_back(settings, monkeypatch):
    run = settings(**ONE_STEP)
    trainer = make_trainer(run)
    trainer.sampler.budget.tokens, trainer.updater.budget.tokens = 111, 222  # lowered by memory
    trainer.checkpoints.save(trainer.state)
    checkpoint = trainer.checkpoints.path(trainer.state)
    metadata = json.loads((checkpoint / "state.json").read_text())
    draw()
    metadata["random"].append(json.loads(json.dumps(get_rng_states())))
    expected = draw()
    (checkpoint / "state.json").write_text(json.dumps(metadata))
    trainer.sampler.budget.tokens = trainer.updater.budget.tokens = None
    trainer.updater.budget.is_found = False  # as on a GPU before its first update
    monkeypatch.setattr(trainer.checkpoints, "accelerator", SimpleNamespace(process_index=1))
    trainer.restore(checkpoint)
    assert (trainer.sampler.budget.tokens, trainer.updater.budget.tokens) == (111, 222)
    assert trainer.updater.budget.is_found
    assert draw() == expected


def draw() -> list[float]:
    normal = random.gauss(0, 1)  # Python and NumPy keep the second value of a pair in their state
    return [normal, random.random(), np.random.randn(), np.random.rand(), float(torch.rand(()))]


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
    after = make_settings(
        name="other",
        warm_start={"steps": 2, "lr": 1e-3},
        resume=True,
        data={"train": "moved.jsonl", "curriculum": {}},
        optim={"lr": 1.0, "max_steps": 7, "schedule": "linear"},
        checkpoint={"every": 3},
        logging={"samples_every": 1},
        rollout={"temperature": 0.5},
        objective={"num_iterations": 2, "epsilon": 0.3},
    )
    check_same_settings(before, after, "step-7", COUNTING)


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
    ids=["fewer", "another", "more", "another answer", "earlier turns"],
)
def test_the_first_training_example_that_differs_is_named(now, message):
    settings = make_settings(data={"train": "e.jsonl"})
    with pytest.raises(UserError) as caught:
        check_same_data(compute_digests(EXAMPLES), "d.jsonl", now, settings, "step-7")
    assert message in str(caught.value)
    check_same_data(compute_digests(EXAMPLES), "d.jsonl", list(EXAMPLES), settings, "step-7")


def test_an_image_is_compared_by_its_name_and_size_and_a_clip_by_its_times_too():
    image = FIRST.images[0]
    clip = VideoRef(image.name, image.size, image.resized_size, path=Path("a.mp4"), times=(0, 1))
    images = [image, replace(image, name="other"), replace(image, size=(1, 1))]
    images += [clip, replace(clip, times=(0, 2))]
    digests = compute_digests([replace(FIRST, images=(own,)) for own in images])
    assert len(digests.unique(dim=0)) == 5


def test_other_versions_of_libraries_cause_a_warning(caplog):
    now = {"torch": "2", "peft": "1"}
    warn_about_versions(now, now)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        warn_about_versions({"torch": "1", "peft": "1"}, now)
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
