"""The state of a run is saved in a checkpoint and restored, weight by weight."""

from __future__ import annotations

import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_copies import record_copies
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

from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.checkpoint import manager
from vlm_grpo.training.checkpoint.manager import (
    AsyncWriter,
    CheckpointManager,
    check_resumable,
    get_versions,
)
from vlm_grpo.training.checkpoint.state import get_rng_states, set_rng_states
from vlm_grpo.training.checkpoint.store import read_metadata
from vlm_grpo.training.trainer import train

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


def test_an_adapter_is_restored_and_a_renamed_weight_is_an_error(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    trainer = make_trainer(small_run(tmp_path, model, policy=LORA, **ONE_STEP))
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


def test_bfloat16_weights_with_8_bit_moments_resume_bit_for_bit(tmp_path):
    """The steps of every optimizer are compared in ``tests/dist/test_optimizer.py``."""
    optim = {"name": "adamw_8bit", "lr": 1e-3, "lr_vision": 1e-4}
    changes: Any = {"policy": {"dtype": "bfloat16", "master_weights": "bfloat16"}, "optim": optim}
    changes["checkpoint"] = {"every": 2, "keep_last": 0}
    source = save_tiny_model(tmp_path / "model")
    whole = small_run(tmp_path, source, name="whole", **changes)
    checkpoint = train(whole).checkpoint
    assert {weight.dtype for weight in load_weights(checkpoint).values()} == {torch.bfloat16}
    assert load_file(checkpoint / "optimizer.safetensors")[STATE].dtype == torch.uint8
    resumed = small_run(tmp_path, source, name="resumed", resume=True, **changes)
    shutil.copytree(whole.run_dir, resumed.run_dir)
    shutil.rmtree(resumed.run_dir / "checkpoints" / "step-4")
    train(resumed)
    assert_same_run(whole.run_dir, resumed.run_dir)
    with pytest.raises(UserError, match=r'optim.name was "adamw_8bit" and is now "adamw"'):
        train(
            small_run(
                tmp_path, source, **{**changes, "name": "resumed", "resume": True, "optim": {}}
            )
        )


@pytest.mark.parametrize("file", ["optimizer", "reference"])
def test_optimizer_and_reference_of_other_weights_are_errors(tmp_path, file):
    model = save_tiny_model(tmp_path / "model")
    reference = {"beta": 0.1, "reference_refresh_every": 2}
    run = small_run(tmp_path, model, policy=LORA, objective=reference, **ONE_STEP)
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


def test_a_checkpoint_records_versions_settings_and_pixel_budget(tmp_path):
    run = small_run(tmp_path, save_tiny_model(tmp_path / "model"), **ONE_STEP)
    numbers = read_metadata(train(run).checkpoint)
    assert numbers["versions"] == get_versions()
    assert set(get_versions()) >= {"python", "vlm-grpo", "torch", "transformers", "peft"}
    assert numbers["settings"]["optim.lr"] == 1e-2
    assert numbers["pixel_budget"] == {"min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28}


def test_a_pixel_budget_as_version_0_1_0_wrote_it_is_resumed_and_another_is_refused(tmp_path):
    run = small_run(tmp_path, save_tiny_model(tmp_path / "model"), **ONE_STEP)
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
def test_an_asynchronous_checkpoint_equals_a_synchronous_one(tmp_path, policy, capsys):
    model = save_tiny_model(tmp_path / "model")
    changes: Any = {"policy": policy, "checkpoint": {"every": 1, "keep_last": 0}}
    changes["objective"] = {"beta": 0.1, "reference_refresh_every": 2}
    synchronous = small_run(tmp_path, model, name="synchronous", **changes)
    changes["checkpoint"] |= {"asynchronous": True}
    asynchronous = small_run(tmp_path, model, name="asynchronous", **changes)
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
def test_a_thread_writes_only_asynchronous_checkpoints(tmp_path, monkeypatch, asynchronous):
    """Training continues meanwhile, so that it gets copies of the weights, which cost memory."""
    model = save_tiny_model(tmp_path / "model")
    trainer = make_trainer(small_run(tmp_path, model, checkpoint={"asynchronous": asynchronous}))
    written: list[tuple[bool, bool]] = []
    pointers = {weight.data_ptr() for _, weight in trainer.policy.trainable_parameters()}

    def record(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        is_copy = pointers.isdisjoint(weight.data_ptr() for weight in weights.values())
        written.append((threading.current_thread() is not threading.main_thread(), is_copy))

    monkeypatch.setattr(trainer.policy, "save", record)
    trainer.checkpoints.save(trainer.state)
    trainer.checkpoints.writer.wait()
    assert written == [(asynchronous, asynchronous)]


def test_a_failed_step_waits_for_its_asynchronous_checkpoint(tmp_path, monkeypatch):
    model = save_tiny_model(tmp_path / "model")
    trainer = make_trainer(small_run(tmp_path, model, checkpoint={"asynchronous": True}))
    trainer.step()
    save = trainer.policy.save

    def save_slowly(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        time.sleep(0.5)
        save(folder, weights)

    def fail(*arguments: Any) -> Any:
        raise UserError("an image cannot be read")

    monkeypatch.setattr(trainer.policy, "save", save_slowly)
    monkeypatch.setattr(trainer.sampler, "sample", fail)
    with pytest.raises(UserError, match="cannot be read"):
        trainer.step()
    assert (trainer.settings.run_dir / "checkpoints" / "step-1" / "manifest.json").is_file()


def test_an_error_of_an_asynchronous_checkpoint_ends_the_run(tmp_path, monkeypatch):
    model = save_tiny_model(tmp_path / "model")
    checkpoint = {"every": 1, "asynchronous": True}
    trainer = make_trainer(small_run(tmp_path, model, checkpoint=checkpoint))

    def full(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer.policy, "save", full)
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


def fill_disk() -> None:
    raise OSError("No space left on device")


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


def test_an_interrupt_does_not_wait():
    forever = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        raise_within(AsyncWriter(), forever.wait, KeyboardInterrupt())
    forever.set()
