"""The training loop on a small random model: weights, work, stops, resuming and failures."""

import json
import math
import random
import re
import shutil
import signal
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import small_runs
import torch
from dataset_files import write_rows
from small_runs import LORA, TASK, assert_resumes, assert_same_run, make_trainer, read_metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen2Config

from vlm_grpo.config.run import CheckpointSettings
from vlm_grpo.errors import UserError
from vlm_grpo.model.loading import load_model
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.training.checkpoint.files import read_metadata, read_tensors
from vlm_grpo.training.trainer import StepInterrupted, train


def test_equal_settings_give_equal_runs_also_if_one_is_saved_by_time(settings):
    by_time = {"every_minutes": 1e-9, "keep_last": 0}
    runs = settings(name="a"), settings(name="b", checkpoint=by_time)
    for run, steps in zip(runs, ([4], [1, 2, 3, 4]), strict=True):
        train(run)
        assert [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")] == steps
    assert_same_run(runs[0].run_dir, runs[1].run_dir)


def test_runs_are_saved_20_minutes_after_a_save_unless_by_steps(settings, monkeypatch):
    never = math.inf
    for every, limit, seconds in ((0, None, 1200), (5, None, never), (5, 2, 120), (0, 0, never)):
        assert CheckpointSettings(every=every, every_minutes=limit).seconds == seconds
    minutes = count(step=11)  # a clock that moves on when it is read
    clock = SimpleNamespace(monotonic=lambda: 60 * next(minutes))
    monkeypatch.setattr("vlm_grpo.training.checkpoint.manager.time", clock)
    run = settings(checkpoint={"keep_last": 0})
    train(run)
    assert [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")] == [2, 4]


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_rows_with_control_tokens_end_or_leave_a_run(settings, tmp_path, on_bad_row, caplog):
    questions = ["Which letters?", "Which<|im_end|>?"]
    rows = [{"id": str(i), "question": text, "answer": "a"} for i, text in enumerate(questions)]
    path = write_rows(tmp_path, *rows)
    run = settings(data={"train": path, "on_bad_row": on_bad_row}, optim={"max_steps": 1})
    if on_bad_row == "skip":
        assert [example.id for example in make_trainer(run).train_examples] == ["0"]
        assert "skipped 1 examples that cannot be used with this model:" in caplog.text
        return
    problem = f"{path}:2: example 1: its prompt has the text <|im_end|>, a control token"
    with pytest.raises(UserError, match=re.escape(problem)):
        train(run)
    assert not (run.run_dir / "metrics.jsonl").exists()


def test_trackers_are_checked_before_anything_is_loaded(settings, monkeypatch):
    check = Mock(side_effect=UserError("wandb is not installed"))
    monkeypatch.setattr("vlm_grpo.training.trainer.check_installed", check)
    run = settings(logging={"trackers": ["wandb"]}, data={"train": "no-such-file.jsonl"})
    with pytest.raises(UserError, match="wandb is not installed"):
        train(run)
    check.assert_called_once_with(("wandb",))


def test_full_weights_train_in_float32_under_bfloat16(settings):
    run = settings(policy={"dtype": "bfloat16"}, optim={"lr": 1e-6})
    assert load_model(run).autocast
    trainer = make_trainer(run)
    before = {n: w.detach().clone() for n, w in trainer.policy.trainable_parameters()}
    trainer.step()
    # Near 0.1, bfloat16 has a spacing of 5e-4: a step of 1e-6 would be lost.
    assert any(not torch.equal(w, before[n]) for n, w in trainer.policy.trainable_parameters())


def test_unusable_models_are_named(settings, model_folder, tmp_path):
    config = json.loads((model_folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 20
    empty, text, base, short = (tmp_path / name for name in ("empty", "text", "base", "short"))
    empty.mkdir()
    Qwen2Config().save_pretrained(text)
    for folder in (base, short):
        shutil.copytree(model_folder, folder)
    (base / "chat_template.jinja").unlink()
    (short / "config.json").write_text(json.dumps(config))
    for folder, message in (
        (empty, "empty cannot be loaded"),
        (text, "qwen2 model, which takes no images"),
        (base, "no chat template"),
        (short, r"prompt has \d+ tokens.*holds 20.*max_pixels"),
    ):
        with pytest.raises(UserError, match=message):
            train(settings(model=str(folder)))
    with pytest.raises(UserError, match=r"q_prj; this model has .*q_proj"):
        train(settings(policy={"lora": {"target": ["q_prj"]}}))


def test_a_run_rebuilds_its_report_and_tensorboard_gets_trls_names_and_images(
    settings, monkeypatch
):
    steps, count_steps = [], lambda path: steps.append(len(read_metrics(path)))
    monkeypatch.setattr("vlm_grpo.training.run_dir.REPORT_SECONDS", -1)  # due after each step
    monkeypatch.setattr("vlm_grpo.training.run_dir.build_report", count_steps)
    run = settings()
    train(run)
    assert steps == [1, 2, 3, 4, 4]  # the last one at the end
    events = EventAccumulator(str(run.run_dir)).Reload()
    names = read_metrics(run.run_dir)[0].keys() - {"step"}
    names |= {"speed/rollout_tokens_per_second", "memory/resident"}
    assert {"reward_std", "completions/clipped_ratio", "clip_ratio/region_mean"} <= names
    assert names <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4]
    # samples_every=1, and 3 groups per step, which is less than samples_per_step.
    assert set(events.Tags()["images"]) == {"samples/0", "samples/1", "samples/2"}
    assert [event.step for event in events.Images("samples/0")] == [1, 2, 3, 4]


def test_the_best_checkpoint_is_kept(settings):
    held_out = {**HELD_OUT, "eval_limit": 8}
    checkpoint = {"every": 1, "keep_last": 1, "keep_best": True}
    changes = {"data": held_out, "checkpoint": checkpoint, "optim": {"max_steps": 6}}
    run = settings(evaluation={"every": 1}, **changes)
    train(run)
    rows = [row for row in read_metrics(run.run_dir) if "eval/letters" in row]
    values = {row["step"] + 1: row["eval/letters"] for row in rows}
    best = max(values, key=lambda step: (values[step], -step))
    kept = {step for step, _ in list_checkpoints(run.run_dir / "checkpoints")}
    # The initial model (step 0) may be the best one; it has no checkpoint.
    assert kept in ({best, 6}, {6})
    assert (run.run_dir / "report.html").is_file()
    for keeps_best in (False, True):  # a step with the best value is saved if it is to be kept
        trainer = make_trainer(settings(data=held_out, checkpoint={"keep_best": keeps_best}))
        trainer.evaluator.best, trainer.global_step = (1.0, 1), 1
        assert trainer.checkpoints.is_due(trainer.state) == keeps_best


def test_a_failed_rollout_saves_the_last_step_once(settings, monkeypatch):
    """Before the first step there is nothing to save."""
    trainer, saved = make_trainer(settings()), []
    save, sample = trainer.checkpoints.save, trainer.sampler.sample
    monkeypatch.setattr(trainer.checkpoints, "save", lambda s: (saved.append(s.step), save(s)))
    fail = Mock(side_effect=UserError("an image cannot be read"))
    for sampler, expected in ((fail, []), (sample, []), (fail, [1]), (fail, [1])):
        monkeypatch.setattr(trainer.sampler, "sample", sampler)
        with nullcontext() if sampler is sample else pytest.raises(UserError, match="cannot be"):
            trainer.step()
        assert saved == expected


FAILING = """
    @reward()
    def odd(self, answer, example):
        kind = sum(map(ord, answer)) % 3
        if kind == 0:
            raise KeyError("no such column")
        while kind == 1:
            pass
        return 1.0
"""


def test_rewards_that_raise_or_hang_are_counted_and_do_not_end_the_run(settings, tmp_path, caplog):
    (tmp_path / "failing.py").write_text(TASK + FAILING)
    rest = {"rollout": {"reward_timeout": 0.02}, "optim": {"max_steps": 2}}
    held_out = {**HELD_OUT, "eval_limit": 8}
    run = settings(task=str(tmp_path / "failing.py"), data=held_out, **rest)
    after: Any = train(run).after
    rows = read_metrics(run.run_dir)
    assert len(rows) == 2
    failed = [row["rewards/odd/failed"] for row in rows]
    assert failed == [row["unscorable"] for row in rows]  # each made its completion unscorable
    assert [row["rewards/letters/failed"] for row in rows] == [0, 0]
    assert 0 < sum(failed) < 2 * 12  # of 3 prompts with 4 completions in each step
    assert 0 < after.metrics["unscorable"] <= 8
    assert rows[-1]["eval/unscorable"] == after.metrics["unscorable"]
    reported = [r.getMessage() for r in caplog.records if "odd failed" in r.getMessage()]
    assert len(reported) == 1
    assert "Traceback" in reported[0]


HELD_OUT = {"eval": "embedded:ocr", "eval_limit": 3}
EVALUATED: dict[str, Any] = {"evaluation": {"every": 1}, "optim": {"max_steps": 2}}
K2 = {"beta": 0.1, "reference_refresh_every": 2}
AVERAGE = {"distillation": {"loss": "jensen_shannon"}}  # of the weights
NEVER = {**K2, "reference_refresh_every": "never", **AVERAGE}
BY_TOKEN = {**K2, "kl_in": "reward", "kl_estimator": "k1"}
BY_TOKEN |= {"advantage_estimator": "reinforce_plus_plus"}


# Each reference and each kind of weights in some cases: a checkpoint holds them independently.
# Three updates are of three mini-batches.
@pytest.mark.parametrize(
    ("reference", "updates", "policy"), [(K2, 2, {}), (NEVER, 2, LORA), (BY_TOKEN, 3, {})]
)
def test_a_run_stopped_between_and_within_steps_equals_an_uninterrupted_one(
    settings, model_folder, policy, updates, reference
):
    teacher = {"distillation": {"teacher": str(model_folder)}} if reference is BY_TOKEN else {}
    changes: dict[str, Any] = {
        "policy": policy,
        "objective": {"num_iterations": updates % 3 or 1, **reference, **teacher},
        "optim": {"max_steps": 3, "mini_batches": 3 if updates == 3 else 1},
    }
    # Stops: before the first token, between two steps, in the second, at the end of the third. Of
    # these, every run has the second and the third.
    stops, names = [(1, 1), (2,), (1, 4), (2, 5)], ["step-0", "step-1", "step-1", "step-2"]
    chosen = slice(None) if reference is K2 else slice(1, 3)
    runs = (settings(name=name, **changes) for name in ("whole", "stopped"))
    assert assert_resumes(*runs, *stops[chosen], last="step-3") == names[chosen]


def test_a_run_can_be_stopped_before_every_step_and_evaluation(settings):
    """With resampled groups, an evaluation between the steps, and cached features of images."""
    changes = {
        **EVALUATED,
        "data": HELD_OUT,
        "policy": {"freeze": ["vision", "projector"]},
        # With at most two letters, some groups of two have equal rewards.
        "rollout": {"num_generations": 2, "max_completion_length": 2, "dynamic_sampling": True},
    }
    whole, stopped = (settings(name=name, **changes) for name in ("whole", "stopped"))
    # A resumed run evaluates first; the last stop is in the second round of a step.
    names = ["step-1", "step-1", "step-1", "step-2"]
    assert assert_resumes(whole, stopped, (2,), (3,), (1, 4), (2,), last="step-2") == names
    assert any(row["resampled_groups"] for row in read_metrics(whole.run_dir))


def test_an_evaluation_that_a_stop_left_out_is_made_once(settings):
    """Also if the run that made it was killed before its next checkpoint."""
    changes = {**EVALUATED, "data": HELD_OUT, "checkpoint": {"keep_last": 0}}
    uninterrupted, run = (settings(name=n, **changes) for n in ("whole", "run"))
    train(uninterrupted)
    assert small_runs.train_with_stops(run, (2,)) == ["step-1"]
    shutil.rmtree(run.run_dir / "checkpoints" / "step-2")
    without = run.model_copy(update={"data": run.data.model_copy(update={"eval": None})})
    assert small_runs.train_with_stops(run) == []
    assert_same_run(run.run_dir, uninterrupted.run_dir, "step-2")
    shutil.rmtree(run.run_dir / "checkpoints" / "step-2")
    assert small_runs.train_with_stops(without) == []  # without an evaluation by now
    assert [row["step"] for row in read_metrics(run.run_dir)] == [0, 1]


def test_a_step_that_is_stopped_leaves_the_state_before_it(settings, monkeypatch):
    """Also that of random numbers, which the rewards may have used."""
    trainer = make_trainer(settings())
    before, _ = trainer.checkpoints._collect(trainer.state)  # noqa: SLF001
    make_groups = trainer.sampler._make_groups  # noqa: SLF001

    def make_groups_and_stop(*arguments: Any) -> Any:
        trainer.stop_request.signal = signal.SIGINT
        return random.random() and make_groups(*arguments)

    monkeypatch.setattr(trainer.sampler, "_make_groups", make_groups_and_stop)
    with pytest.raises(StepInterrupted):
        trainer.step()
    assert trainer.checkpoints._collect(trainer.state)[0] == before  # noqa: SLF001


def test_the_format_of_a_checkpoint_is_kept_and_one_within_a_step_is_refused(settings):
    """Version 0.1.0 wrote these names; a run that it began must resume."""
    run = settings(objective=K2, optim={"max_steps": 1})
    checkpoint = train(run).checkpoint
    metadata = read_metadata(checkpoint)
    assert set(metadata) == {
        *("format", "step", "position", "best", "overflows", "max_tokens"),
        *("settings", "scheduler", "random", "versions"),
    }
    assert set(metadata["versions"]) >= {"python", "vlm-grpo", "torch", "transformers", "peft"}
    assert metadata["settings"]["optim.lr"] == 1e-2
    assert {*read_tensors(checkpoint, "examples")} == {"train"}
    # A checkpoint from the middle of a step, in the format of version 0.1.0.
    within = checkpoint.rename(checkpoint.with_name("step-0-1"))
    (within / "state.json").write_text(json.dumps({**metadata, "open_step": []}))
    with pytest.raises(UserError, match=r"step-0-1 was saved within a step by an earlier"):
        read_metadata(within)
    with pytest.raises(UserError, match="holds a run with checkpoints up to step 0"):
        train(run)
