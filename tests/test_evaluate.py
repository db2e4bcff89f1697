"""Evaluation: the same whatever the batch, resumed where it stopped, compared by example."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo import evaluate as evaluation
from vlm_grpo.config import Settings, load_settings
from vlm_grpo.data import load_examples
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.evaluate import evaluate, evaluate_benchmark, evaluate_policy
from vlm_grpo.intervals import bootstrap_interval
from vlm_grpo.judge import Judge
from vlm_grpo.loading import model_source
from vlm_grpo.policy import load_policy
from vlm_grpo.registry import load_task

BENCHMARK = """
title: Shapes
converter: make_shapes
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
                for row in evaluate_policy(policy, task, examples, changed, Judge()).rows
            ]
        )
    same = [len(set(texts)) == 1 for texts in zip(*found, strict=True)]
    assert sum(same) / len(same) >= 0.99


def test_a_stopped_evaluation_goes_on_with_the_same_result(
    rows: Path, benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", 16)  # 40 rows: chunks of 16, 16 and 8
    unbroken = settings_for(rows, tmp_path, "unbroken")
    (expected,) = evaluate_benchmark(benchmark, unbroken)

    broken = settings_for(rows, tmp_path, "broken")
    complete = evaluation.complete

    def stopping(*arguments: Any) -> Any:
        for count, chunk in enumerate(complete(*arguments)):
            if count == 1:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(evaluation, "complete", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate_benchmark(benchmark, broken)
    assert len(outputs(broken.run_dir / "model")) == 16
    monkeypatch.setattr(evaluation, "complete", complete)
    (found,) = evaluate_benchmark(benchmark, broken)
    assert found.values == expected.values
    assert outputs(broken.run_dir / "model") == outputs(unbroken.run_dir / "model")


def test_predictions_are_scored_without_a_model(
    rows: Path, benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    golds = [json.loads(line) for line in rows.read_text().splitlines()]
    path = tmp_path / "outputs.jsonl"
    # Every second answer is one too many.
    lines = [{"id": g["id"], "output": str(g["answer"] + i % 2)} for i, g in enumerate(golds)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = settings_for(rows, tmp_path).model_copy(update={"model": "/no/such/model"})
    (report,) = evaluate_benchmark(benchmark, settings, predictions=path)
    assert report.value == 50.0
    printed = capsys.readouterr().out
    assert "Shapes: exact 50.0" in printed
    assert "somebody's" in printed


def test_a_checkpoint_stands_beside_its_model(
    rows: Path, benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(model_source("embedded"), copy)
    base, same = evaluate_benchmark(benchmark, settings_for(rows, tmp_path), copy)
    assert base.values == same.values
    assert "difference +0.0" in capsys.readouterr().out


def test_the_recipes_evaluation_writes_what_it_scored(rows: Path, tmp_path: Path) -> None:
    settings = settings_for(rows, tmp_path)
    found = evaluate(settings)
    assert found.n == 40
    assert found.interval[0] <= found.value <= found.interval[1]
    written = (settings.run_dir / "evaluation" / "model.jsonl").read_text().splitlines()
    scores = [json.loads(line)["rewards"]["exact"] for line in written]
    assert sum(scores) / 40 == pytest.approx(found.value)


def test_a_missing_checkpoint_is_named(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is no folder"):
        evaluate(settings_for(rows, tmp_path), tmp_path / "nowhere")


def test_the_interval_covers_the_mean() -> None:
    low, high = bootstrap_interval([0.0] * 60 + [1.0] * 40, seed=0)
    # Normal approximation: 0.4 ± 1.96 · sqrt(0.4 · 0.6 / 100) = 0.304 … 0.496.
    assert (low, high) == (pytest.approx(0.304, abs=0.02), pytest.approx(0.496, abs=0.02))
    assert bootstrap_interval([1.0, 1.0], seed=0) == (1.0, 1.0)
