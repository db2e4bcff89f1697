"""Evaluation: the same whatever the batch, resumed where it stopped, compared by example."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.benchmarks import held_out_task
from vlm_grpo.config.run import Settings, load_settings
from vlm_grpo.coordinates import FRAMES
from vlm_grpo.data import load_examples
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.evaluation import generate
from vlm_grpo.evaluation.evaluate import (
    Evaluation,
    evaluate,
    evaluate_benchmark,
    evaluate_policy,
    score_benchmark,
)
from vlm_grpo.evaluation.predictions import PredictionLog
from vlm_grpo.model.loading import get_model_source
from vlm_grpo.model.policy import load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.rewards.scorer import RewardScorer
from vlm_grpo.trainer import train
from vlm_grpo.types import Example, ImageRef

BENCHMARK = """
title: Shapes
task: counting
metric: exact
splits: {test: 40}
published:
  - {model: somebody's, split: test, value: 55.0, source: nowhere}
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "shapes"
    assert make_shapes.main(["--count", "40", "--seed", "5", "--out", str(folder)]) == 0
    return folder / "counting.jsonl"


@pytest.fixture
def benchmark(tmp_path: Path) -> str:
    path = tmp_path / "shapes.yaml"
    path.write_text(BENCHMARK)
    return str(path)


def settings_for(rows: Path, tmp_path: Path, name: str = "run") -> Settings:
    overrides = [f"data.eval={rows}", f"output_dir={tmp_path / 'runs'}", f"name={name}"]
    return load_settings("counting", [*overrides, "data.eval_limit=null"])


def outputs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_answers_do_not_depend_on_the_batch() -> None:
    settings = load_settings("counting", ["data.eval_limit=60"])
    policy = load_policy(settings, training=False)
    task = load_task("counting", frame=policy.frame)
    examples = load_examples("embedded:counting", task, settings.data, "eval")
    found = []
    for tokens in (1, 500, 100_000):
        limits = settings.evaluation.model_copy(update={"max_tokens_per_batch": tokens})
        changed = settings.model_copy(update={"evaluation": limits})
        found.append(
            [
                row["output"]
                for row in evaluate_policy(policy, task, examples, changed, RewardScorer()).rows
            ]
        )
    same = [len(set(texts)) == 1 for texts in zip(*found, strict=True)]
    assert sum(same) / len(same) >= 0.99


def test_parts_hold_a_bounded_number_of_pixels() -> None:
    def example(name: int, *sides: int) -> Example:
        images = tuple(ImageRef("a", (1, 1), (side, side), data=b"") for side in sides)
        return Example(str(name), images, "?", 1)

    # Sides of 2,048: four such images are the budget of 2 ** 24 pixels.
    large = [example(i, 2048) for i in range(9)]
    assert generate.parts(large) == [range(0, 4), range(4, 8), range(8, 9)]
    several = [example(i, 2048, 2048, 2048) for i in range(3)]
    assert generate.parts(several) == [range(0, 1), range(1, 2), range(2, 3)]
    huge = [example(0, 28), example(1, 8000), example(2, 28)]
    assert generate.parts(huge) == [range(0, 1), range(1, 2), range(2, 3)]
    small = [example(i, 28) for i in range(150)]
    assert generate.parts(small) == [range(0, 64), range(64, 128), range(128, 150)]
    assert generate.parts([]) == []


def test_a_stopped_evaluation_goes_on_with_the_same_result(
    rows: Path, benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "PART_EXAMPLES", 16)  # 40 rows: parts of 16, 16 and 8
    unbroken = settings_for(rows, tmp_path, "unbroken")
    (expected,) = evaluate_benchmark(benchmark, unbroken)

    broken = settings_for(rows, tmp_path, "broken")
    add = PredictionLog.add

    def stopping(log: PredictionLog, *arguments: Any) -> None:
        add(log, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(PredictionLog, "add", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate_benchmark(benchmark, broken)
    folder = broken.run_dir / "model"
    assert len((folder / "predictions-0.jsonl").read_text().splitlines()) == 16
    monkeypatch.setattr(PredictionLog, "add", add)
    (found,) = evaluate_benchmark(benchmark, broken)
    assert found.values == expected.values
    assert outputs(folder) == outputs(unbroken.run_dir / "model")
    results = [(s.run_dir / "results.json").read_text() for s in (broken, unbroken)]
    assert results[0] == results[1]
    record = json.loads(results[0])
    assert record["model"]["value"] == pytest.approx(expected.value)
    assert record["comparison"] is None


def test_other_rows_are_not_taken_for_answered_ones(
    rows: Path, benchmark: str, tmp_path: Path
) -> None:
    settings = settings_for(rows, tmp_path)
    evaluate_benchmark(benchmark, settings)
    often = settings.evaluation.model_copy(update={"every": 5})  # when, but not what
    evaluate_benchmark(benchmark, settings.model_copy(update={"evaluation": often}))
    rows.write_text(rows.read_text().replace("How many", "Say how many"))
    with pytest.raises(UserError, match=r"questions was .* and is"):
        evaluate_benchmark(benchmark, settings)


@pytest.mark.parametrize("shift", [0, 1])
def test_predictions_are_scored_without_a_model(
    rows: Path, benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture, shift: int
) -> None:
    golds = [json.loads(line) for line in rows.read_text().splitlines()]
    path = tmp_path / "outputs.jsonl"
    # With shift every second answer is one too many.
    lines = [
        {"id": g["id"], "output": str(g["answer"] + shift * (i % 2))} for i, g in enumerate(golds)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = settings_for(rows, tmp_path).model_copy(update={"model": "/no/such/model"})
    report = score_benchmark(benchmark, settings, path)
    assert report.value == 100.0 - 50.0 * shift
    printed = capsys.readouterr().out
    assert f"Shapes: exact {report.value:.1f}" in printed
    assert "somebody's" in printed


def test_what_an_evaluation_wrote_scores_the_same_again(tmp_path: Path) -> None:
    definition = tmp_path / "boxes.yaml"
    definition.write_text("title: Boxes\ntask: grounding\nmetric: accuracy_50\n")
    overrides = ["data.eval_limit=40", f"output_dir={tmp_path / 'runs'}"]
    settings = load_settings("grounding", overrides)
    (report,) = evaluate_benchmark(str(definition), settings)
    assert 0 < report.value < 100
    path = settings.run_dir / "model" / "predictions.jsonl"
    # The embedded model writes in pixels of the image that it saw.
    again = score_benchmark(str(definition), settings, path, FRAMES["resized"])
    assert again.values == report.values


def test_a_run_is_judged_by_its_benchmark(rows: Path, benchmark: str, tmp_path: Path) -> None:
    text = Path(benchmark).read_text().replace("exact", "absolute_error")
    Path(benchmark).write_text(text + 'prompt: "Look. {question}"\nvariants: [exact]\n')
    settings = settings_for(rows, tmp_path)
    wanted = settings.evaluation.model_copy(update={"benchmark": benchmark})
    settings = settings.model_copy(update={"evaluation": wanted, "task_options": {"tags": True}})
    task = load_task("counting", tags=True, frame=FRAMES["permille"])
    judge = held_out_task(settings, task)
    row = load_examples(str(rows), judge, settings.data)[0]
    assert judge.prompt(row) == f"Look. {task.prompt(row)}"
    assert (judge.tags, judge.frame.name) == (True, "permille")
    assert (judge.primary_metric, judge.lower_is_better) == ("absolute_error", True)
    # Reward workers get the task pickled.
    again = pickle.loads(pickle.dumps(judge))
    assert again.score("<answer>3</answer>", row) == judge.score("<answer>3</answer>", row)
    assert again.corpus_metrics([3], [row]) == judge.corpus_metrics([3], [row])
    other = settings.model_copy(update={"task": "ocr", "task_options": {"tags": True, "x": 1}})
    assert held_out_task(other, task).tags, "the options that every task has are taken over"


def test_less_of_an_error_is_better() -> None:
    def found(value: float, lower: bool) -> Evaluation:
        return Evaluation("x", 1, {"x": value}, (value, value), (), lower)

    for lower in (False, True):
        assert found(2.0, lower).better_than(3.0) is lower
        assert found(3.0, lower).better_than(2.0) is not lower
        assert found(2.0, lower).better_than(None)
        assert not found(2.0, lower).better_than(2.0)
        assert not found(math.nan, lower).better_than(None)
    assert str(found(2.0, True)) == "x 2.000 [2.000, 2.000] (n = 1)"


def test_a_checkpoint_stands_beside_its_model(
    rows: Path, benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(get_model_source("embedded"), copy)
    base, same = evaluate_benchmark(benchmark, settings_for(rows, tmp_path), copy)
    assert base.values == same.values
    assert "difference +0.0" in capsys.readouterr().out
    results = json.loads((tmp_path / "runs" / "run" / "results.json").read_text())
    assert results["comparison"]["n"] == 40
    assert results["checkpoint"] == results["model"]


def test_the_recipes_evaluation_writes_what_it_scored(rows: Path, tmp_path: Path) -> None:
    settings = settings_for(rows, tmp_path)
    found = evaluate(settings)
    assert found.n == 40
    assert found.interval[0] <= found.value <= found.interval[1]
    written = (settings.run_dir / "evaluation" / "model.jsonl").read_text().splitlines()
    scores = [json.loads(line)["rewards"]["exact"] for line in written]
    assert sum(scores) / 40 == pytest.approx(found.value)


def test_a_missing_checkpoint_is_named(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        evaluate(settings_for(rows, tmp_path), tmp_path / "nowhere")


def test_training_keeps_the_checkpoint_that_is_best_by_its_benchmark(
    rows: Path, tmp_path: Path
) -> None:
    definition = tmp_path / "errors.yaml"
    definition.write_text(
        "title: Errors\ntask: counting\nmetric: absolute_error\nvariants: [rmse]\n"
    )
    overrides = [
        *(f"data.eval={rows}", "data.eval_limit=null", f"evaluation.benchmark={definition}"),
        *("evaluation.every=1", "optim.max_steps=4", "optim.prompts_per_step=4", "optim.lr=3e-4"),
        *("optim.warmup_steps=0", "checkpoint.every=1", "checkpoint.keep_last=1"),
        *("checkpoint.keep_best=true", f"output_dir={tmp_path / 'runs'}", "name=judged"),
    ]
    result = train(load_settings("counting", overrides))
    assert result.after is not None
    assert result.after.primary_metric == "absolute_error"
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    errors = {row["step"] + 1: row["eval/absolute_error"] for row in map(json.loads, lines)}
    assert len(set(errors.values())) > 1, "the learning rate is large enough to change answers"
    least = min(errors, key=lambda step: (errors[step], step))
    assert result.before is not None
    kept = {path.name for path in (result.run_dir / "checkpoints").iterdir()}
    # The model as loaded (step 0) may be the best of all; it has no checkpoint.
    expected = {"step-4"} if result.before.value <= errors[least] else {"step-4", f"step-{least}"}
    assert kept == expected
    assert "absolute error" in (result.run_dir / "report.html").read_text()
