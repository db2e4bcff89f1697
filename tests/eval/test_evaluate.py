"""Evaluations of recipes: their summaries and files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.eval.evaluate import evaluate
from vlm_grpo.eval.scored import Row, Scored, summarize
from vlm_grpo.training.trainer import train
from vlm_grpo.types import Example


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """40 counting examples on disk."""
    folder = tmp_path / "shapes"
    assert (
        make_shapes.draw_examples.main(["--count", "40", "--seed", "5", "--out", str(folder)]) == 0
    )
    return folder / "counting.jsonl"


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
    examples = [
        Example(str(n), (), "?", "YES", {"kind": kind}) for n, kind in enumerate(["a", "a", "b"])
    ]
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
