"""A run that is stopped resumes to the same result bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from small_runs import (
    LORA,
    StopAt,
    assert_same_run,
    assert_same_weights,
    make_trainer,
    read_metrics,
    read_samples,
    save_tiny_model,
    small_run,
)

from vlm_grpo.config.run import Settings
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.training import trainer as trainer_module
from vlm_grpo.training.checkpoint.store import read_metadata, read_tensors
from vlm_grpo.training.trainer import StepInterrupted, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train_with_stops(run: Settings, stops: list[tuple[int, ...]]) -> list[str]:
    """Train to the end with a ``StopAt`` in each call but the last; return the checkpoints."""
    resumed, checkpoints = run.model_copy(update={"resume": True}), []
    for stop in stops:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer_module, "StopRequest", lambda *_, stop=stop: StopAt(*stop))
            with pytest.raises(Stopped) as stopped:
                train(resumed)
        checkpoints.append(str(stopped.value).partition("checkpoints/")[2].partition(";")[0])
    train(resumed)
    return checkpoints


REFERENCES = {
    "none": {"beta": 0.0},
    "k1": {"beta": 0.1, "reference_refresh_every": 1},
    "k2": {"beta": 0.1, "reference_refresh_every": 2},
    "never": {"beta": 0.1, "reference_refresh_every": "never"},
    "by token": {
        **{"beta": 0.1, "reference_refresh_every": 2, "kl_in": "reward", "kl_estimator": "k1"},
        **{"advantage_estimator": "reinforce_plus_plus", "distillation": {}},
    },
}
POLICIES = {"full": {}, "lora": LORA}


# Each reference and each kind of weights in some cases: a checkpoint holds them independently.
# Three updates are of three mini-batches.
@pytest.mark.parametrize(
    ("reference", "updates", "policy"),
    [
        ("none", 2, "full"),
        ("k2", 2, "full"),
        ("never", 2, "lora"),
        ("k1", 1, "lora"),
        ("by token", 3, "full"),
    ],
)
def test_a_run_stopped_between_and_within_steps_equals_an_uninterrupted_one(
    tmp_path, model, policy, updates, reference
):
    changes: dict[str, Any] = {
        "policy": POLICIES[policy],
        "objective": {"num_iterations": updates % 3 or 1, **REFERENCES[reference]},
        "optim": {"max_steps": 3, "mini_batches": 3 if updates == 3 else 1},
    }
    if "distillation" in changes["objective"]:
        changes["objective"] |= {"distillation": {"teacher": str(model)}}
    uninterrupted = small_run(tmp_path, model, name="uninterrupted", **changes)
    train(uninterrupted)
    stopped = small_run(tmp_path, model, name="stopped", **changes)
    # Before the first step has a token, between two, within the second, and at the third's end.
    stops = [(1, 1), (2,), (1, 4), (2, 5)]
    assert train_with_stops(stopped, stops) == ["step-0", "step-1", "step-1", "step-2"]
    assert_same_run(stopped.run_dir, uninterrupted.run_dir, "step-3")


@pytest.mark.parametrize("freeze", [[], ["vision", "projector"]], ids=["trained", "frozen"])
def test_a_run_can_be_stopped_before_every_step_and_evaluation(tmp_path, model, freeze):
    """With resampled groups, an evaluation between the steps, and cached features of images."""
    changes: dict[str, Any] = {
        "policy": {"freeze": freeze},
        "data": {"eval": "embedded:ocr", "eval_limit": 3},
        "evaluation": {"every": 1},
        "optim": {"max_steps": 2},
        # With at most two letters, some groups of two have equal rewards.
        "rollout": {
            "num_generations": 2,
            "max_completion_length": 2,
            "dynamic_sampling": True,
        },
    }
    uninterrupted = small_run(tmp_path, model, name="uninterrupted", **changes)
    train(uninterrupted)
    stopped = small_run(tmp_path, model, name="stopped", **changes)
    # A resumed run evaluates first; the last stop is in the second round of a step.
    names = ["step-1", "step-1", "step-1", "step-2"]
    assert train_with_stops(stopped, [(2,), (3,), (1, 4), (2,)]) == names
    rows = read_metrics(uninterrupted.run_dir)
    assert any(row["resampled_groups"] for row in rows)
    for a, b in zip(rows, read_metrics(stopped.run_dir), strict=True):
        # A resumed run decodes images again that the other has in its cache.
        assert {**b, "work/image_decodes": a["work/image_decodes"]} == a
    assert read_samples(stopped.run_dir) == read_samples(uninterrupted.run_dir)
    folders = (run.run_dir / "checkpoints" / "step-2" for run in (stopped, uninterrupted))
    assert_same_weights(*folders)


def test_an_evaluation_that_a_stop_left_out_is_made_once(tmp_path, model):
    """Also if the run that made it was killed before its next checkpoint."""
    changes: dict[str, Any] = {
        "data": {"eval": "embedded:ocr", "eval_limit": 3},
        "evaluation": {"every": 1},
        "optim": {"max_steps": 2},
        "checkpoint": {"keep_last": 0},
    }
    uninterrupted, run = (small_run(tmp_path, model, name=n, **changes) for n in ("whole", "run"))
    train(uninterrupted)
    assert train_with_stops(run, [(2,)]) == ["step-1"]
    shutil.rmtree(run.run_dir / "checkpoints" / "step-2")
    without = run.model_copy(update={"data": run.data.model_copy(update={"eval": None})})
    assert train_with_stops(run, []) == []
    assert_same_run(run.run_dir, uninterrupted.run_dir, "step-2")
    shutil.rmtree(run.run_dir / "checkpoints" / "step-2")
    assert train_with_stops(without, []) == []  # without an evaluation by now
    assert [row["step"] for row in read_metrics(run.run_dir)] == [0, 1]


def test_a_step_that_is_stopped_leaves_the_state_before_it(tmp_path, model, monkeypatch):
    """Also that of random numbers, which the rewards may have used."""
    trainer = make_trainer(small_run(tmp_path, model))
    before = trainer.checkpoints._collect(trainer.state).metadata  # noqa: SLF001
    make_groups = trainer.sampler._make_groups  # noqa: SLF001

    def make_groups_and_stop(*arguments: Any) -> Any:
        trainer.stop_request.signal = signal.SIGINT
        return random.random() and make_groups(*arguments)

    monkeypatch.setattr(trainer.sampler, "_make_groups", make_groups_and_stop)
    with pytest.raises(StepInterrupted):
        trainer.step()
    assert trainer.checkpoints._collect(trainer.state).metadata == before  # noqa: SLF001


def test_the_format_of_a_checkpoint_is_kept(tmp_path, model):
    """Version 0.1.0 wrote these names; a run that it began must resume."""
    objective = {"beta": 0.1, "reference_refresh_every": 2}
    run = small_run(tmp_path, model, objective=objective, optim={"max_steps": 1})
    checkpoint = train(run).checkpoint
    assert set(read_metadata(checkpoint)) == {
        *("format", "step", "position", "best", "overflows", "max_tokens"),
        *("settings", "pixel_budget", "scheduler", "random", "versions"),
    }
    assert {*read_tensors(checkpoint, "examples")} == {"train"}


def test_a_checkpoint_within_a_step_is_refused(tmp_path, model):
    """Earlier versions wrote it; its weights are neither those of the step's start nor its end."""
    run = small_run(tmp_path, model, optim={"max_steps": 1}).model_copy(update={"resume": True})
    checkpoint = train(run).checkpoint
    within = checkpoint.rename(checkpoint.with_name("step-0-1"))
    metadata = json.loads((within / "state.json").read_text())
    (within / "state.json").write_text(json.dumps({**metadata, "open_step": []}))
    with pytest.raises(UserError, match=r"step-0-1 was saved within a step by an earlier"):
        read_metadata(within)
    with pytest.raises(UserError, match="holds a run with checkpoints up to step 0"):
        train(run.model_copy(update={"resume": False}))
