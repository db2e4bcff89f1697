"""Evaluations of recipes: when they are due in training, the best of them, summaries, files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import load_data
from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.dist.strategy import DataParallel
from vlm_grpo.errors import UserError
from vlm_grpo.eval.evaluate import HeldOutEvaluator, evaluate
from vlm_grpo.eval.scored import Row, Scored, summarize
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.training.trainer import train
from vlm_grpo.types import Example


def make_settings(rows: Path, tmp_path: Path, name: str = "run") -> Settings:
    overrides = [f"data.eval={rows}", f"output_dir={tmp_path / 'runs'}", f"name={name}"]
    return load_settings("counting", [*overrides, "data.eval_limit=null"])


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_a_value_is_better_if_higher_or_for_an_error_if_lower(lower_is_better: bool) -> None:
    def make_evaluation(value: float) -> Scored:
        return Scored((), "x", {"x": value}, lower_is_better)

    assert make_evaluation(2.0).is_better_than(3.0) is lower_is_better
    assert make_evaluation(3.0).is_better_than(2.0) is not lower_is_better
    assert make_evaluation(2.0).is_better_than(None)
    assert not make_evaluation(2.0).is_better_than(2.0)
    assert not make_evaluation(math.nan).is_better_than(None)


def test_an_error_is_printed_as_a_number_and_a_share_in_percent() -> None:
    error = Scored((), "x", {"x": 2}, True, intervals={"x": (2, 3)})
    assert str(error) == "x 2.000 [2.000, 3.000] (n = 0)"
    share = Scored((), "x", {"x": 0.5}, intervals={"x": (0, 1)})
    assert str(share) == "x 50.0% [0.0%, 100.0%] (n = 0)"


def test_a_lone_surrogate_in_an_answer_can_be_written(tmp_path: Path) -> None:
    answer = "\ud83d"  # from JSON in an output; UTF-8 cannot encode it
    row = Row(id="1", output="", answer=answer, reward=1.0, rewards={}, metrics={})
    Scored((row,), "x", {"x": 1}).write(tmp_path / "p.jsonl")
    assert read_jsonl(tmp_path / "p.jsonl") == [row]


def test_mean_over_groups_has_no_interval_of_its_examples(tmp_path: Path) -> None:
    definition = tmp_path / "groups.yaml"
    definition.write_text(
        "title: Words\ntask: ocr\nmetric: word_recognition\naverage: groups\ngroups: [kind]\n"
    )
    task = load_benchmark(str(definition)).load_task()
    examples = [Example(kind, (), "?", "YES", {"kind": kind[0]}) for kind in ("a1", "a2", "b")]
    texts = ["YES", "YES", "NO"]
    scores = [task.score(text, example) for text, example in zip(texts, examples, strict=True)]
    found = summarize(task, examples, texts, scores, seed=0)
    assert found.value == pytest.approx(0.5)  # the mean over groups; over examples it is 2/3
    assert math.isnan(found.interval[0])
    assert str(found) == "word_recognition 50.0% (n = 3)"


def test_the_evaluation_of_a_recipe_writes_its_scores(rows: Path, tmp_path: Path) -> None:
    settings = make_settings(rows, tmp_path)
    evaluation = evaluate(settings)
    assert evaluation.n == 40
    assert evaluation.interval[0] <= evaluation.value <= evaluation.interval[1]
    path = settings.run_dir / "evaluation" / "model.jsonl"
    assert evaluation.path == path
    scores = [row["rewards"]["exact"] for row in read_jsonl(path)]
    assert sum(scores) / 40 == pytest.approx(evaluation.value)


def test_a_missing_checkpoint_is_named(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        evaluate(make_settings(rows, tmp_path), tmp_path / "nowhere")


def test_training_keeps_the_best_checkpoint_by_its_benchmark(rows: Path, tmp_path: Path) -> None:
    definition = tmp_path / "errors.yaml"
    definition.write_text(
        "title: Errors\ntask: counting\nmetric: absolute_error\nvariants: [rmse]\n"
    )
    overrides = [
        *(f"data.eval={rows}", "data.eval_limit=null", f"evaluation.benchmark={definition}"),
        "data.train_limit=40",
        *("evaluation.every=1", "optim.max_steps=4", "optim.prompts_per_step=4", "optim.lr=3e-4"),
        *("optim.warmup_steps=0", "checkpoint.every=1", "checkpoint.keep_last=1"),
        *("checkpoint.keep_best=true", f"output_dir={tmp_path / 'runs'}", "name=benchmark"),
    ]
    result = train(load_settings("counting", overrides))
    assert result.after is not None
    assert result.after.primary_metric == "absolute_error"
    metrics = read_jsonl(result.run_dir / "metrics.jsonl")
    errors = {row["step"] + 1: row["eval/absolute_error"] for row in metrics}
    assert len(set(errors.values())) > 1, "the learning rate is large enough to change answers"
    least = min(errors, key=lambda step: (errors[step], step))
    assert result.before is not None
    kept = {path.name for path in (result.run_dir / "checkpoints").iterdir()}
    # The initial model (step 0) may be the best; it has no checkpoint.
    expected = {"step-4"} if result.before.value <= errors[least] else {"step-4", f"step-{least}"}
    assert kept == expected
    assert "absolute error" in (result.run_dir / "report.html").read_text()


def small_settings(*overrides: str) -> Settings:
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
    evaluator = make_evaluator(small_settings(*overrides))
    assert [step for step in range(1, 8) if evaluator.is_due(step)] == [3, 6, 7]


def test_the_first_of_equal_results_is_the_best() -> None:
    evaluator = make_evaluator(small_settings())
    first, second = evaluator.evaluate(0), evaluator.evaluate(5)
    assert first is not None
    assert second is not None
    assert first.value == second.value  # the weights have not changed
    assert evaluator.best == (first.value, 0)


def test_several_samples_are_evaluated_in_training_too() -> None:
    evaluator = make_evaluator(small_settings("evaluation.temperature=1", "evaluation.samples=2"))
    found = evaluator.evaluate(0)
    assert found is not None
    assert (found.n, {len(row.get("samples", [])) for row in found.rows}) == (4, {2})
    assert found.metrics["mean_at_2"] == found.value <= found.metrics["pass_at_2"]


def test_evaluation_on_the_training_data_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "How many?", "answer": 3}\n')
    task, other = load_task("counting"), small_settings(f"data.eval={path}")
    load_data(small_settings(), task)  # the embedded data, whose splits differ
    load_data(other, task)
    assert "not on held-out" not in caplog.text
    load_data(small_settings(f"data.eval={path}", f"data.train={path}"), task)
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
    load_data(small_settings(*sources), load_task("counting"))
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
    load_data(small_settings(*sources), task)
    load_data(
        small_settings(sources[0], f"data.eval={tmp_path}/videos.jsonl", "data.video.fps=1"), task
    )
    assert warning not in caplog.text
    load_data(small_settings(*sources, "data.video.fps=1"), task)
    assert warning in caplog.text
