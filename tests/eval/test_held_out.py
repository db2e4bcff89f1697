"""Evaluation during training: when it is due, and which result is the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.run_data import load_data
from vlm_grpo.dist.data_parallel import DataParallel
from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.eval.held_out import HeldOutEvaluator
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer


def make_settings(*overrides: str) -> Settings:
    return load_settings("counting", ["data.eval_limit=4", "data.train_limit=4", *overrides])


def make_evaluator(settings: Settings) -> HeldOutEvaluator:
    task = load_task("counting")
    _, examples = load_data(settings, task)
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


def test_several_samples_are_evaluated_in_training_too() -> None:
    evaluator = make_evaluator(make_settings("evaluation.temperature=1", "evaluation.samples=2"))
    found = evaluator.evaluate(0)
    assert found is not None
    assert (found.n, {len(row.get("samples", [])) for row in found.rows}) == (4, {2})
    assert found.metrics["mean_at_2"] == found.value <= found.metrics["pass_at_2"]


def test_evaluation_on_the_training_data_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "How many?", "answer": 3}\n')
    task, other = load_task("counting"), make_settings(f"data.eval={path}")
    load_data(make_settings(), task)  # the embedded data, whose splits differ
    load_data(other, task)
    assert "not on held-out" not in caplog.text
    load_data(make_settings(f"data.eval={path}", f"data.train={path}"), task)
    assert "data.eval is data.train: the evaluation is not on held-out examples" in caplog.text


def test_images_that_are_also_trained_on_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, image = tmp_path / "rows.jsonl", tmp_path / "a.png"
    Image.new("RGB", (30, 30)).save(image)
    row = {"images": ["a.png"], "question": "How many?", "answer": 3}
    rows.write_text(json.dumps(row) + "\n")
    (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
    sources = f"data.train={rows}", f"data.eval={tmp_path}/other.jsonl"
    load_data(make_settings(*sources), load_task("counting"))
    assert "1 of 1 held-out examples show an image that is also trained on" in caplog.text


def test_settings_of_videos_are_warned_about_if_there_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    row = {"question": "How many?", "answer": 3}
    video = {"videos": [{"frames": ["a.png", "a.png"]}]}
    for name, extra in (("images", {"images": ["a.png"]}), ("videos", video)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | extra) + "\n")
    sources = f"data.train={tmp_path}/images.jsonl", f"data.eval={tmp_path}/images.jsonl"
    task, warning = load_task("counting"), "data.video has no effect: no example has a video"
    load_data(make_settings(*sources), task)
    load_data(
        make_settings(sources[0], f"data.eval={tmp_path}/videos.jsonl", "data.video.fps=1"), task
    )
    assert warning not in caplog.text
    load_data(make_settings(*sources, "data.video.fps=1"), task)
    assert warning in caplog.text
