"""Evaluations: resumed after a stop, compared by example, and written to disk."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.eval import generate
from vlm_grpo.eval.evaluate import evaluate, evaluate_benchmark, score_benchmark
from vlm_grpo.eval.predictions import PredictionLog
from vlm_grpo.eval.scored import Row, Scored, summarize
from vlm_grpo.model.loading import get_model_source
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.training.trainer import train
from vlm_grpo.types import Example

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
    """40 counting examples on disk."""
    folder = tmp_path / "shapes"
    assert (
        make_shapes.draw_examples.main(["--count", "40", "--seed", "5", "--out", str(folder)]) == 0
    )
    return folder / "counting.jsonl"


@pytest.fixture
def benchmark(tmp_path: Path) -> str:
    """The definition of a benchmark of these examples."""
    path = tmp_path / "shapes.yaml"
    path.write_text(BENCHMARK)
    return str(path)


def make_settings(rows: Path, tmp_path: Path, name: str = "run") -> Settings:
    overrides = [f"data.eval={rows}", f"output_dir={tmp_path / 'runs'}", f"name={name}"]
    return load_settings("counting", [*overrides, "data.eval_limit=null"])


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_stopped_evaluation_resumes_with_the_same_result(
    rows: Path, benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "CHUNK_EXAMPLES", 16)  # 40 rows: chunks of 16, 16 and 8
    uninterrupted = make_settings(rows, tmp_path, "uninterrupted")
    (expected,) = evaluate_benchmark(benchmark, uninterrupted)

    stopped = make_settings(rows, tmp_path, "stopped")
    append = PredictionLog.append

    def append_and_stop(log: PredictionLog, *arguments: Any) -> None:
        append(log, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(PredictionLog, "append", append_and_stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate_benchmark(benchmark, stopped)
    folder = stopped.run_dir / "model"
    assert len((folder / "predictions-0.jsonl").read_text().splitlines()) == 16
    monkeypatch.setattr(PredictionLog, "append", append)
    (resumed,) = evaluate_benchmark(benchmark, stopped)
    assert resumed.values == expected.values
    files = [run.run_dir / "model" / "predictions.jsonl" for run in (stopped, uninterrupted)]
    assert read_jsonl(files[0]) == read_jsonl(files[1])
    results = [(s.run_dir / "results.json").read_text() for s in (stopped, uninterrupted)]
    assert results[0] == results[1]
    content = json.loads(results[0])
    assert content["model"]["value"] == pytest.approx(expected.value)
    assert content["comparison"] is None


def test_an_evaluation_of_other_questions_is_not_resumed(
    rows: Path, benchmark: str, tmp_path: Path
) -> None:
    settings = make_settings(rows, tmp_path)
    evaluate_benchmark(benchmark, settings)
    often = settings.evaluation.model_copy(update={"every": 5})  # does not change the outputs
    evaluate_benchmark(benchmark, settings.model_copy(update={"evaluation": often}))
    rows.write_text(rows.read_text().replace("How many", "Say how many"))
    with pytest.raises(UserError, match=r"questions was .* and is now"):
        evaluate_benchmark(benchmark, settings)


@pytest.mark.parametrize("shift", [0, 1])
def test_predictions_are_scored_without_a_model(
    rows: Path, benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture, shift: int
) -> None:
    golds = read_jsonl(rows)
    path = tmp_path / "outputs.jsonl"
    # With shift=1 every second answer is too high by one.
    lines = [
        {"id": g["id"], "output": str(g["answer"] + shift * (i % 2))} for i, g in enumerate(golds)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = make_settings(rows, tmp_path).model_copy(update={"model": "/no/such/model"})
    report = score_benchmark(benchmark, settings, path)
    assert report.value == 100.0 - 50.0 * shift
    out = capsys.readouterr().out
    assert f"Shapes: exact {report.value:.1f}" in out
    assert "somebody's" in out


def test_the_written_predictions_score_the_same_again(tmp_path: Path) -> None:
    definition = tmp_path / "boxes.yaml"
    definition.write_text("title: Boxes\ntask: grounding\nmetric: accuracy_50\n")
    overrides = ["data.eval_limit=40", f"output_dir={tmp_path / 'runs'}"]
    settings = load_settings("grounding", overrides)
    (report,) = evaluate_benchmark(str(definition), settings)
    assert 0 < report.value < 100
    path = settings.run_dir / "model" / "predictions.jsonl"
    # The embedded model writes boxes in pixels of the resized image.
    again = score_benchmark(str(definition), settings, path, FRAMES["resized"])
    assert again.values == report.values
    saved = [
        json.loads((settings.run_dir / f"results{part}.json").read_text())
        for part in ("", "-predictions")
    ]
    assert saved[0]["model"]["value"] == saved[1]["predictions"]["value"] == report.value


PAGES = """
title: Pages
task: ocr
metric: word_recognition
reader: text
script_outputs: markdown
"""


def make_pages(rows: Path, tmp_path: Path) -> str:
    """Turn the rows into pages named after images, and return the definition of a benchmark."""
    pages = [
        row | {"id": f"images/{n}.png", "answer": "a"} for n, row in enumerate(read_jsonl(rows))
    ]
    rows.write_text("".join(json.dumps(page) + "\n" for page in pages))
    path = tmp_path / "pages.yaml"
    path.write_text(PAGES)
    return str(path)


def read_pages(folder: Path) -> dict[str, str]:
    return {f"images/{path.stem}.png": path.read_text() for path in folder.iterdir()}


def test_a_stopped_evaluation_resumes_and_writes_the_same_pages(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "CHUNK_EXAMPLES", 16)
    definition, settings = make_pages(rows, tmp_path), make_settings(rows, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PredictionLog, "finish", lambda *_: 1 / 0)  # all outputs are in the log
        with pytest.raises(ZeroDivisionError):
            evaluate_benchmark(definition, settings)
    folder = settings.run_dir / "run-model-markdown"
    assert not folder.exists()
    for _ in range(2):  # a finished evaluation writes the same again
        evaluate_benchmark(definition, settings)
        outputs = read_jsonl(settings.run_dir / "model" / "predictions.jsonl")
        assert read_pages(folder) == {row["id"]: row["output"] for row in outputs}
        assert len(outputs) == 40


def test_the_pages_of_predictions_have_no_thinking_and_no_tags(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    definition, settings = make_pages(rows, tmp_path), make_settings(rows, tmp_path)
    forms = ["# {}\n", "<think>b</think># {}", "<think>b</think><answer># {}</answer>", ""]
    lines = [
        {"id": row["id"], "output": forms[n % 4].format(n)}
        for n, row in enumerate(read_jsonl(rows))
    ]
    path = tmp_path / "outputs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    score_benchmark(definition, settings, path)
    folder = settings.run_dir / "run-predictions-markdown"
    assert f"outputs for the official script in {folder}" in capsys.readouterr().out
    texts = ["# 0\n", "# 1", "# 2", ""]
    assert [read_pages(folder)[f"images/{n}.png"] for n in range(4)] == texts


def test_pages_of_one_name_are_refused_before_the_model_is_loaded(
    rows: Path, tmp_path: Path
) -> None:
    definition = make_pages(rows, tmp_path)
    rows.write_text(rows.read_text().replace("images/7.png", "scans/8.jpg"))
    settings = make_settings(rows, tmp_path).model_copy(update={"model": "/no/such/model"})
    with pytest.raises(UserError, match=r"images/8.png' would both be '8.md'"):
        evaluate_benchmark(definition, settings)


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
    row = Row(id="1", output="", answer=answer, rewards={}, metrics={})
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


def test_a_checkpoint_is_compared_with_its_model(
    rows: Path, benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(get_model_source("embedded"), copy)
    base, equal = evaluate_benchmark(benchmark, make_settings(rows, tmp_path), copy)
    assert base.values == equal.values
    assert "difference +0.0" in capsys.readouterr().out
    results = json.loads((tmp_path / "runs" / "run" / "results.json").read_text())
    assert results["comparison"]["n"] == 40
    assert results["checkpoint"] == results["model"]


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
