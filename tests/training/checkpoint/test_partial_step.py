"""A run that is stopped within a step resumes to the same result bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import run_ranks
from partial_step_ranks import make_run, train_on_ranks
from small_runs import (
    LORA,
    TASK,
    StopAt,
    assert_same_run,
    make_trainer,
    read_metrics,
    save_tiny_model,
    small_run,
)

from vlm_grpo.config.run import Settings
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.training import batch as batch_module
from vlm_grpo.training import trainer as trainer_module
from vlm_grpo.training.checkpoint.partial_step import restore_step, serialize_step
from vlm_grpo.training.checkpoint.store import read_metadata, read_tensors
from vlm_grpo.training.trainer import train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train_with_stops(
    run: Settings, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Train to the end with a stop at the n-th check of each call; return the checkpoints."""
    checkpoints = []
    for count in counts:
        monkeypatch.setattr(trainer_module, "StopRequest", lambda *_, n=count: StopAt(n))
        with pytest.raises(Stopped) as stopped:
            train(run.model_copy(update={"resume": True}))
        checkpoints.append(str(stopped.value).partition("checkpoints/")[2].partition(";")[0])
    monkeypatch.undo()
    train(run.model_copy(update={"resume": True}))
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


def test_a_rank_continues_its_own_groups_if_the_number_of_ranks_is_the_same(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the groups of all ranks are dealt out in turn."""
    trainer = make_trainer(small_run(tmp_path, model))
    trainer.stop_request = StopAt(1)
    with pytest.raises(trainer_module.StepInterrupted):
        trainer.step()
    assert trainer.partial is not None
    values, tensors = serialize_step(trainer.partial, trainer.policy)
    tensors |= {f"1{name.removeprefix('0')}": tensor for name, tensor in tensors.items()}
    monkeypatch.setattr(batch_module, "sum_over_ranks", lambda *_: None)  # there is one process
    a, b, c = (group.id for group in trainer.partial.rollout.groups)
    own, all_groups = [a, b, c], [a, b, c, a, b, c]  # of two ranks that saved the same
    for rank, world, expected in ((1, 2, own), (0, 1, all_groups), (1, 3, [b, b]), (1, 4, [b, c])):
        ranks: Any = SimpleNamespace(
            process_index=rank, num_processes=world, device=torch.device("cpu")
        )
        step = restore_step(values * 2, tensors, trainer.sampler, trainer.settings, ranks)
        assert [group.id for group in step.rollout.groups] == expected


# Each reference and each kind of weights in some cases: a checkpoint holds them independently. Runs
# with two updates per step are also stopped before the first, where those with one stop. Three
# updates are of three mini-batches.
@pytest.mark.parametrize(
    ("reference", "updates", "policy"),
    [
        *((reference, 2, "full") for reference in ("none", "k2", "never")),
        *((reference, 2, "lora") for reference in ("k1", "never")),
        ("none", 1, "full"),
        ("k1", 1, "lora"),
        ("k2", 3, "lora"),
        ("by token", 3, "full"),
    ],
)
def test_a_run_stopped_within_steps_equals_an_uninterrupted_one(
    tmp_path: Path,
    model: Path,
    policy: str,
    updates: int,
    reference: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    # A run checks before each step and each update; a resumed run also before its first step.
    counts, expected = {
        1: ([2, 3, 4], ["step-0-0", "step-1", "step-2-0"]),
        2: ([2, 3, 3, 6], ["step-0-0", "step-0-1", "step-1", "step-2-1"]),
        3: ([3, 3, 5], ["step-0-1", "step-0-2", "step-1-1"]),
    }[updates]
    assert train_with_stops(stopped, counts, monkeypatch) == expected
    assert_same_run(stopped.run_dir, uninterrupted.run_dir, "step-3")


@pytest.mark.parametrize("freeze", [[], ["vision", "projector"]], ids=["trained", "frozen"])
def test_a_run_can_be_stopped_before_every_update_and_evaluation(
    tmp_path: Path, model: Path, freeze: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With resampled groups, an evaluation between the steps, and cached features of images."""
    changes: dict[str, Any] = {
        "policy": {"freeze": freeze},
        "objective": {"num_iterations": 2},
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
    # A run checks before each step, update and evaluation: one of them is done between two stops.
    checkpoints = train_with_stops(stopped, [2, 3, 3, 3, 3, 3], monkeypatch)
    expected = ["step-0-0", "step-0-1", "step-0-2", "step-1", "step-1-1", "step-1-2"]
    assert checkpoints == expected
    assert_same_run(stopped.run_dir, uninterrupted.run_dir, "step-2")
    assert any(row["resampled_groups"] for row in read_metrics(uninterrupted.run_dir))


def test_a_prompt_that_changed_since_the_stop_is_named(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path, model)
    monkeypatch.setattr(trainer_module, "StopRequest", lambda *_: StopAt(2))
    with pytest.raises(Stopped):
        train(run)
    monkeypatch.undo()
    question = '    def question(self, example):\n        return "Write letters, please."\n'
    (tmp_path / "letters.py").write_text(f"{TASK}\n{question}")
    with pytest.raises(UserError, match=r"its prompt had \d+ tokens .* and has \d+ now"):
        train(run.model_copy(update={"resume": True}))


def test_the_format_of_a_checkpoint_within_a_step_is_kept(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.1.0 wrote these names; a run that it began must resume."""
    objective = {"num_iterations": 2, "beta": 0.1, "reference_refresh_every": 2}
    run = small_run(tmp_path, model, objective=objective)
    monkeypatch.setattr(trainer_module, "StopRequest", lambda *_: StopAt(3))
    with pytest.raises(Stopped):
        train(run)
    checkpoint = run.run_dir / "checkpoints" / "step-0-1"
    metadata = read_metadata(checkpoint)
    assert set(metadata) == {
        *("format", "step", "position", "best", "overflows", "max_tokens", "open_step"),
        *("settings", "pixel_budget", "scheduler", "random", "versions"),
    }
    (values,) = metadata["open_step"]
    assert set(values) == {
        *("rounds", "resampled", "groups", "metrics", "updates", "losses", "norms", "old_rows"),
        *("work", "image_decodes", "replaced_prompts"),
    }
    assert set(values["work"]) == {"encoder_passes", "prefill_tokens", "update_tokens"}
    assert set(values["groups"][0]) == {"id", "prompt_tokens", "completions"}
    assert set(values["groups"][0]["completions"][0]) == {
        *("tokens", "text", "stop", "rewards", "total", "metrics", "failures"),
    }
    names = {name for name in read_tensors(checkpoint, "open_step") if "/m" not in name}
    kept = ("tokens", "logprobs", "advantages", "reference", "old")
    assert names == {f"0/{name}" for name in kept}
    assert {*read_tensors(checkpoint, "open_step")} >= {"0/mean/kl", "0/maximum/ratio/max"}
    assert {*read_tensors(checkpoint, "examples")} == {"train"}


def launch(folder: Path, model: Path, count: int, name: str) -> None:
    """Run two ranks."""
    run_ranks(folder / "log", 2, train_on_ranks, folder, model, name, count)


@pytest.mark.slow
def test_a_run_stopped_within_a_step_resumes_with_any_number_of_ranks(
    tmp_path: Path, model: Path
) -> None:
    launch(tmp_path, model, 0, "uninterrupted")
    launch(tmp_path, model, 3, "two")
    runs = tmp_path / "runs"
    assert [path.name for path in (runs / "two" / "checkpoints").iterdir()] == ["step-0-1"]
    shutil.copytree(runs / "two", runs / "one")
    launch(tmp_path, model, 0, "two")
    assert_same_run(runs / "uninterrupted", runs / "two", "step-3")
    train(make_run(tmp_path, model, "one"))
    for one, two in zip(
        read_metrics(runs / "one"), read_metrics(runs / "uninterrupted"), strict=True
    ):
        # Sums over ranks have another order; log-probs of six letters lose no more than this.
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
