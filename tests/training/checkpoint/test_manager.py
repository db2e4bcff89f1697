"""The state of a run is saved in a checkpoint and restored, weight by weight."""

import json
import random
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import LORA, assert_same_run, load_weights, make_trainer

from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import load_policy
from vlm_grpo.training.checkpoint.manager import get_rng_states
from vlm_grpo.training.trainer import train

STATE = "model.language_model.layers.0.mlp.up_proj.weight/state1"
ONE_STEP: Any = {"optim": {"max_steps": 1}, "rollout": {"max_completion_length": 2}}


@pytest.mark.parametrize(
    ("policy", "file", "message"),
    [({}, "model", "q_proj"), (LORA, "adapter_model", "weights of the model")],
)
def test_weights_are_restored_and_a_renamed_one_is_an_error(settings, policy, file, message):
    trainer = make_trainer(settings(policy=policy, **ONE_STEP))
    checkpoint = trainer.run().checkpoint
    trained = dict(trainer.policy.trainable_parameters())
    policies = (load_policy(trainer.settings, path) for path in (checkpoint, None))
    found, initial = (dict(policy.trainable_parameters()) for policy in policies)
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


def test_a_step_is_saved_by_all_ranks_if_the_last_save_of_one_is_too_long_ago(
    settings, monkeypatch
):
    trainer = make_trainer(settings())
    trainer.global_step = 1
    assert not trainer.checkpoints.is_due(trainer.state)
    any_rank = "vlm_grpo.training.checkpoint.manager.any_rank"
    monkeypatch.setattr(any_rank, lambda accelerator, is_late: not is_late)  # of another rank
    assert trainer.checkpoints.is_due(trainer.state)
