"""Evaluation during training: when it is due, and which result is the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data import load_examples
from vlm_grpo.distributed.data_parallel import DataParallel
from vlm_grpo.distributed.launch import build_accelerator
from vlm_grpo.evaluation import HeldOutEvaluator, load_held_out
from vlm_grpo.model.policy import load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.rewards.scorer import RewardScorer


def make_settings(*overrides: str) -> Settings:
    return load_settings("counting", ["data.eval_limit=4", "data.train_limit=4", *overrides])


def make_evaluator(settings: Settings) -> HeldOutEvaluator:
    task = load_task("counting")
    examples = load_held_out(settings, task, [])
    strategy = DataParallel(load_policy(settings), build_accelerator(settings))
    return HeldOutEvaluator(strategy, task, examples, settings, RewardScorer())


def test_without_held_out_data_nothing_is_evaluated() -> None:
    settings = load_settings("counting", ["data.eval=null", "evaluation.every=0"])
    evaluator = make_evaluator(settings)
    assert not evaluator.is_due(settings.optim.max_steps)
    assert evaluator.evaluate(0) is None
    assert evaluator.best_step is None


def test_an_evaluation_is_due_at_intervals_and_after_the_last_step() -> None:
    overrides = ["evaluation.every=3", "optim.max_steps=7", "optim.warmup_steps=0"]
    evaluator = make_evaluator(make_settings(*overrides))
    assert [step for step in range(1, 8) if evaluator.is_due(step)] == [3, 6, 7]


def test_the_first_of_equal_results_is_the_best() -> None:
    evaluator = make_evaluator(make_settings())
    first, second = evaluator.evaluate(0), evaluator.evaluate(5)
    assert first is not None
    assert second is not None
    assert first.value == second.value  # the weights have not changed
    assert evaluator.best == (first.value, 0)


def test_evaluation_on_the_training_data_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "How many?", "answer": 3}\n')
    task, other = load_task("counting"), make_settings(f"data.eval={path}")
    load_held_out(make_settings(), task, [])  # the embedded data, whose splits differ
    load_held_out(other, task, [])
    assert "not on held-out" not in caplog.text
    load_held_out(make_settings(f"data.eval={path}", f"data.train={path}"), task, [])
    assert "data.eval is data.train: the evaluation is not on held-out examples" in caplog.text


def test_images_that_are_also_trained_on_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, task = make_settings(), load_task("counting")
    held_out = load_examples("embedded:counting", task, settings.data, "eval")
    assert load_held_out(settings, task, held_out[:1]) == held_out
    assert "1 of 4 held-out examples" in caplog.text
