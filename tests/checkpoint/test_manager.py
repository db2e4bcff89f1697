"""A run's state goes into a checkpoint and comes back, weight by weight."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import (
    LORA,
    assert_same_run,
    save_tiny_model,
    sign,
    small_run,
    trainer_for,
    weights_of,
)
from tiny_models import FAMILIES

from vlm_grpo.checkpoint.manager import versions
from vlm_grpo.checkpoint.rng_state import random_states, restore_random_states
from vlm_grpo.checkpoint.store import read_numbers
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import load_policy
from vlm_grpo.trainer import train

ONE_STEP: Any = {"optim": {"max_steps": 1}, "rollout": {"max_completion_length": 2}}


@pytest.mark.parametrize("family", FAMILIES)
def test_full_weights_come_back_one_by_one(tmp_path: Path, family: str) -> None:
    model = save_tiny_model(tmp_path / "model", family)
    trainer = trainer_for(small_run(tmp_path, model, **ONE_STEP))
    checkpoint = trainer.run().checkpoint
    trained = {name: weight.detach() for name, weight in trainer.policy.trainable_parameters()}
    resumed = load_policy(trainer.settings, checkpoint)
    found = {name: weight.detach() for name, weight in resumed.trainable_parameters()}
    assert set(found) == set(trained)
    assert [name for name in trained if not torch.equal(found[name], trained[name])] == []
    # Were nothing loaded, they would equal the model that training began with.
    initial = dict(load_policy(trainer.settings).trainable_parameters())
    assert any(not torch.equal(found[name], initial[name]) for name in found)

    weights = weights_of(checkpoint)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    weights[name.replace("q_proj", "query_proj")] = weights.pop(name)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="q_proj"):
        load_policy(trainer.settings, checkpoint)


def test_an_adapter_comes_back_and_a_renamed_key_fails(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    trainer = trainer_for(small_run(tmp_path, model, policy=LORA, **ONE_STEP))
    checkpoint = trainer.run().checkpoint
    found = dict(load_policy(trainer.settings, checkpoint).trainable_parameters())
    for name, weight in trainer.policy.trainable_parameters():
        assert torch.equal(found[name], weight), name
    weights = weights_of(checkpoint)
    assert len(weights) == len(found)  # the adapter's alone
    name = next(iter(weights))
    weights[f"{name}.more"] = weights.pop(name)
    save_file(weights, checkpoint / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="weights of the model"):
        load_policy(trainer.settings, checkpoint)


@pytest.mark.parametrize("file", ["optimizer", "reference"])
def test_state_of_other_weights_is_refused(tmp_path: Path, file: str) -> None:
    model = save_tiny_model(tmp_path / "model")
    reference = {"beta": 0.1, "reference_refresh_every": 2}
    run = small_run(tmp_path, model, policy=LORA, objective=reference, **ONE_STEP)
    checkpoint = train(run).checkpoint
    path = checkpoint / f"{file}.safetensors"
    whole = load_file(path)
    first = next(iter(whole))
    weight = first.rpartition("/")[0]
    less = {n: t for n, t in whole.items() if not n.startswith(weight or first)}
    other = {**less, f"other/{first}": whole[first]}
    cut = {**whole, first: whole[first].flatten()[:1].repeat(3)}
    for wrong in (less, other, cut):
        save_file(wrong, path)
        sign(checkpoint)
        with pytest.raises(UserError, match=r"the checkpoint('s| holds no)"):
            train(run.model_copy(update={"resume": True}))


def test_a_checkpoint_names_what_it_was_made_with(tmp_path: Path) -> None:
    run = small_run(tmp_path, save_tiny_model(tmp_path / "model"), **ONE_STEP)
    numbers = read_numbers(train(run).checkpoint)
    assert numbers["versions"] == versions()
    assert set(versions()) >= {"python", "vlm-grpo", "torch", "transformers", "peft"}
    assert numbers["settings"]["optim.lr"] == 1e-2
    assert numbers["pixel_budget"] == {"min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28}


@pytest.mark.parametrize("policy", [{}, LORA], ids=["full", "lora"])
def test_writing_in_the_background_writes_the_same(
    tmp_path: Path, policy: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    more: Any = {"policy": policy, "checkpoint": {"every": 1, "keep_last": 0}}
    more["objective"] = {"beta": 0.1, "reference_refresh_every": 2}
    plain = small_run(tmp_path, model, name="plain", **more)
    more["checkpoint"] |= {"asynchronous": True}
    behind = small_run(tmp_path, model, name="behind", **more)
    train(plain)
    assert "asynchronous" not in capsys.readouterr().out
    train(behind)
    assert "after a crash while a checkpoint is written, the run resumes" in capsys.readouterr().out
    for step in range(1, 5):
        a, b = (run.run_dir / "checkpoints" / f"step-{step}" for run in (plain, behind))
        for path in a.glob("*.safetensors"):
            assert path.read_bytes() == (b / path.name).read_bytes(), path.name
    shutil.rmtree(behind.run_dir / "checkpoints" / "step-4")
    train(behind.model_copy(update={"resume": True}))
    assert_same_run(plain.run_dir, behind.run_dir)


def test_what_the_background_cannot_write_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path / "model")
    checkpoint = {"every": 1, "asynchronous": True}
    trainer = trainer_for(small_run(tmp_path, model, checkpoint=checkpoint))

    def full(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer.policy, "save", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.run()
    assert trainer.global_step < 4


def test_random_states_come_back() -> None:
    def draw() -> tuple[float, float, float]:
        return (np.random.rand(), float(torch.rand(())), random.random())

    states = random_states()
    first = draw()
    assert draw() != first
    restore_random_states(states)
    assert draw() == first
