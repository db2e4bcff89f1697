"""The state of a run is saved in a checkpoint and restored, weight by weight."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gpu_standins import record_copies
from safetensors.torch import load_file, save_file
from small_runs import (
    LORA,
    assert_same_run,
    load_weights,
    make_trainer,
    save_tiny_model,
    small_run,
    update_manifest,
)
from tiny_models import FAMILIES

from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.checkpoint import manager
from vlm_grpo.training.checkpoint.manager import (
    AsyncWriter,
    CheckpointManager,
    check_resumable,
    check_same_data,
    check_same_settings,
    compute_digests,
    flatten_settings,
    get_rng_states,
    get_versions,
    set_rng_states,
    warn_about_versions,
)
from vlm_grpo.training.checkpoint.store import read_metadata
from vlm_grpo.training.trainer import train
from vlm_grpo.types import VideoRef
from vlm_grpo.utils.chat import Turn

STATE = "model.language_model.layers.0.mlp.up_proj.weight/state1"
ONE_STEP: Any = {"optim": {"max_steps": 1}, "rollout": {"max_completion_length": 2}}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_restored_and_a_renamed_one_is_an_error(tmp_path, family):
    model = save_tiny_model(tmp_path / "model", family)
    trainer = make_trainer(small_run(tmp_path, model, **ONE_STEP))
    checkpoint = trainer.run().checkpoint
    trained = {name: weight.detach() for name, weight in trainer.policy.trainable_parameters()}
    resumed = load_policy(trainer.settings, checkpoint)
    found = {name: weight.detach() for name, weight in resumed.trainable_parameters()}
    assert set(found) == set(trained)
    assert [name for name in trained if not torch.equal(found[name], trained[name])] == []
    # If nothing had been loaded, they would equal the initial model.
    initial = dict(load_policy(trainer.settings).trainable_parameters())
    assert any(not torch.equal(found[name], initial[name]) for name in found)

    weights = load_weights(checkpoint)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name.replace("q_proj", "query_proj")] = weights.pop(name)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="q_proj"):
        load_policy(trainer.settings, checkpoint)


def test_an_adapter_is_restored_and_a_renamed_weight_is_an_error(settings):
    trainer = make_trainer(settings(policy=LORA, **ONE_STEP))
    checkpoint = trainer.run().checkpoint
    found = dict(load_policy(trainer.settings, checkpoint).trainable_parameters())
    for name, weight in trainer.policy.trainable_parameters():
        assert torch.equal(found[name], weight), name
    weights = load_weights(checkpoint)
    assert len(weights) == len(found)  # those of the adapter only
    name = next(iter(weights))
    weights[f"{name}.more"] = weights.pop(name)
    save_file(weights, checkpoint / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="weights of the model"):
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


@pytest.mark.parametrize("file", ["optimizer", "reference"])
def test_optimizer_and_reference_of_other_weights_are_errors(settings, file):
    reference = {"beta": 0.1, "reference_refresh_every": 2}
    run = settings(policy=LORA, objective=reference, **ONE_STEP)
    checkpoint = train(run).checkpoint
    path = checkpoint / f"{file}.safetensors"
    tensors = load_file(path)
    first = next(iter(tensors))
    weight = first.rpartition("/")[0]
    missing = {n: t for n, t in tensors.items() if not n.startswith(weight or first)}
    renamed = {**missing, f"other/{first}": tensors[first]}
    reshaped = {**tensors, first: tensors[first].flatten()[:1].repeat(3)}
    for wrong in (missing, renamed, reshaped):
        save_file(wrong, path)
        update_manifest(checkpoint)
        with pytest.raises(UserError, match=r"the checkpoint('s| holds no)"):
            train(run.model_copy(update={"resume": True}))


def test_a_checkpoint_records_versions_settings_and_pixel_budget(settings):
    run = settings(**ONE_STEP)
    numbers = read_metadata(train(run).checkpoint)
    assert numbers["versions"] == get_versions()
    assert set(get_versions()) >= {"python", "vlm-grpo", "torch", "transformers", "peft"}
    assert numbers["settings"]["optim.lr"] == 1e-2
    assert numbers["pixel_budget"] == {"min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28}


def test_a_pixel_budget_as_version_0_1_0_wrote_it_is_resumed_and_another_is_refused(settings):
    run = settings(**ONE_STEP)
    checkpoint = train(run).checkpoint
    assert checkpoint is not None
    state = json.loads((checkpoint / "state.json").read_text())
    state["pixel_budget"] = {"min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28}
    (checkpoint / "state.json").write_text(json.dumps(state))
    update_manifest(checkpoint)
    make_trainer(run).restore(checkpoint)
    state["pixel_budget"]["max_pixels"] = 28 * 28
    (checkpoint / "state.json").write_text(json.dumps(state))
    update_manifest(checkpoint)
    with pytest.raises(UserError, match="was trained with the pixel budget"):
        make_trainer(run).restore(checkpoint)
    policy = run.policy.model_copy(update={"max_video_pixels": 28 * 28})
    other = run.model_copy(update={"policy": policy})
    with pytest.raises(UserError, match=r"policy\.max_video_pixels"):
        check_resumable(checkpoint, other, (), load_task("counting"))


@pytest.mark.parametrize("policy", [{}, LORA], ids=["full", "lora"])
def test_an_asynchronous_checkpoint_equals_a_synchronous_one(settings, policy, capsys):
    changes: Any = {"policy": policy, "checkpoint": {"every": 1, "keep_last": 0}}
    changes["objective"] = {"beta": 0.1, "reference_refresh_every": 2}
    synchronous = settings(name="synchronous", **changes)
    changes["checkpoint"] |= {"asynchronous": True}
    asynchronous = settings(name="asynchronous", **changes)
    train(synchronous)
    note = (
        "\nnote       checkpoint.asynchronous: after a crash while a checkpoint is written, the "
        "run resumes from the previous one\n"
    )
    assert note not in (text := capsys.readouterr().out)
    assert "asynchronous:" not in text
    train(asynchronous)
    assert note in capsys.readouterr().out
    for step in range(1, 5):
        a, b = (run.run_dir / "checkpoints" / f"step-{step}" for run in (synchronous, asynchronous))
        for path in a.glob("*.safetensors"):
            assert path.read_bytes() == (b / path.name).read_bytes(), path.name
    shutil.rmtree(asynchronous.run_dir / "checkpoints" / "step-4")
    train(asynchronous.model_copy(update={"resume": True}))
    assert_same_run(synchronous.run_dir, asynchronous.run_dir)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_thread_writes_only_asynchronous_checkpoints(settings, monkeypatch, asynchronous):
    """Training continues meanwhile, so that it gets copies of the weights, which cost memory."""
    trainer = make_trainer(settings(checkpoint={"asynchronous": asynchronous}))
    written: list[tuple[bool, bool]] = []
    pointers = {weight.data_ptr() for _, weight in trainer.policy.trainable_parameters()}

    def record(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        is_copy = pointers.isdisjoint(weight.data_ptr() for weight in weights.values())
        written.append((threading.current_thread() is not threading.main_thread(), is_copy))

    monkeypatch.setattr(trainer.policy, "save", record)
    trainer.checkpoints.save(trainer.state)
    trainer.checkpoints.writer.wait()
    assert written == [(asynchronous, asynchronous)]


def test_a_failed_step_waits_for_its_asynchronous_checkpoint(settings, monkeypatch):
    trainer = make_trainer(settings(checkpoint={"asynchronous": True}))
    trainer.step()
    save = trainer.policy.save

    def save_slowly(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        time.sleep(0.5)
        save(folder, weights)

    error = UserError("an image cannot be read")
    monkeypatch.setattr(trainer.policy, "save", save_slowly)
    monkeypatch.setattr(trainer.sampler, "sample", Mock(side_effect=error))
    with pytest.raises(UserError, match="cannot be read"):
        trainer.step()
    assert (trainer.settings.run_dir / "checkpoints" / "step-1" / "manifest.json").is_file()


def test_an_error_of_an_asynchronous_checkpoint_ends_the_run(settings, monkeypatch):
    checkpoint = {"every": 1, "asynchronous": True}
    trainer = make_trainer(settings(checkpoint=checkpoint))
    error = OSError("No space left on device")
    monkeypatch.setattr(trainer.policy, "save", Mock(side_effect=error))
    with pytest.raises(OSError, match="No space left"):
        trainer.run()
    assert trainer.global_step < 4


def test_an_asynchronous_checkpoint_copies_only_what_was_not_gathered(monkeypatch):
    live = {"sharded": torch.ones(2), "plain": torch.ones(2)}
    gathered = torch.ones(2)
    monkeypatch.setattr(
        manager, "gather_full", lambda tensors, keep: {**tensors, "sharded": gathered}
    )
    holder: Any = SimpleNamespace(
        settings=SimpleNamespace(checkpoint=SimpleNamespace(sharded=False, asynchronous=True)),
        accelerator=SimpleNamespace(is_main_process=True),
    )
    found = CheckpointManager._gather(holder, live)  # noqa: SLF001
    assert found["sharded"] is gathered
    live["plain"].zero_()
    assert found["plain"].tolist() == [1, 1]


def test_live_weights_on_a_gpu_are_copied_to_pinned_memory(monkeypatch):
    weight = torch.arange(4.0)
    tensors = {"head": weight, "embeddings": weight, "half": weight[:2], "none": torch.zeros(0)}
    calls = record_copies(monkeypatch)
    copies = manager._copy_to_host(tensors)  # noqa: SLF001
    assert calls == ["pin", *["copy_ without waiting"] * 3, "wait"]
    assert copies["head"] is copies["embeddings"]
    weight.zero_()
    assert copies["head"].tolist() == [0, 1, 2, 3]
    assert copies["half"].tolist() == [0, 1]


# Random numbers.


def draw() -> list[float]:
    normal = random.gauss(0, 1)  # Python and NumPy keep the second value of a pair in their state
    return [normal, random.random(), np.random.randn(), np.random.rand(), float(torch.rand(()))]


def test_restored_generators_repeat_their_numbers():
    draw()
    states = json.loads(json.dumps(get_rng_states()))
    first = draw()
    assert draw() != first
    set_rng_states(states)
    assert draw() == first


# The background thread.


fill_disk = Mock(side_effect=OSError("No space left on device"))


def check_until_error(writer: AsyncWriter) -> None:
    while True:
        writer.check()


def raise_within(writer: AsyncWriter, job: Callable[[], object], error: BaseException) -> None:
    with writer:
        writer.start(job)
        raise error


def test_jobs_run_one_at_a_time_and_in_order():
    finished, lock = [], threading.Lock()

    def job(number: int) -> None:
        assert lock.acquire(blocking=False)  # no other job is running
        finished.append(number)
        lock.release()

    with AsyncWriter() as writer:
        for number in range(20):
            writer.start(lambda number=number: job(number))
    assert finished == list(range(20))


def test_exit_waits_for_the_job():
    free, done = threading.Event(), []
    with AsyncWriter() as writer:
        writer.start(lambda: (free.wait(10), done.append(True)))
        threading.Timer(0.05, free.set).start()
    assert done


def test_an_error_is_raised_once_by_the_next_call():
    writer = AsyncWriter()
    writer.start(fill_disk)
    with pytest.raises(OSError, match="No space left"):
        writer.start(lambda: None)
    writer.wait()
    writer.start(fill_disk)
    with pytest.raises(OSError, match="No space left"):
        check_until_error(writer)


def test_exit_raises_the_error_of_the_last_job():
    with pytest.raises(OSError, match="No space left"), AsyncWriter() as writer:
        writer.start(fill_disk)


def test_an_error_of_the_caller_is_raised_and_that_of_the_job_logged(caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="first"):
        raise_within(AsyncWriter(), fill_disk, ValueError("first"))
    assert "a background job failed too" in caplog.text


def test_a_job_whose_wait_was_interrupted_is_waited_for_again(monkeypatch):
    free, done, writer = threading.Event(), [], AsyncWriter()
    writer.start(lambda: (free.wait(10), done.append(True)))
    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
    free.set()
    writer.wait()
    assert done


def test_an_interrupt_does_not_wait():
    forever = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        raise_within(AsyncWriter(), forever.wait, KeyboardInterrupt())
    forever.set()


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


def test_a_run_is_checked_before_its_model_is_loaded(settings):
    run = settings(policy=LORA, optim={"max_steps": 1})
    train(run)
    again = run.model_copy(update={"resume": True, "model": "nowhere/at-all"})
    with pytest.raises(UserError, match='is now "nowhere/at-all"'):
        train(again)
    fewer = run.data.model_copy(update={"train_limit": 11})
    with pytest.raises(UserError, match=r"12 of data\.train=embedded:ocr then, 11 of"):
        train(run.model_copy(update={"resume": True, "data": fewer}))
