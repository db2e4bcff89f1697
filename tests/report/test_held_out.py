"""A run that is judged by an error, or by a metric of the whole set: its page, card and alarms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from report_runs import make_run

from vlm_grpo.benchmarks import load_benchmark
from vlm_grpo.config.run import load_settings
from vlm_grpo.deploy.export import build_model_card
from vlm_grpo.deploy.resolve import resolve_model
from vlm_grpo.evaluation.evaluate import summarize
from vlm_grpo.report import build_report
from vlm_grpo.report.panels import charts, comparison
from vlm_grpo.report.run import Run, read_run
from vlm_grpo.trainer import train
from vlm_grpo.types import Example

HELD_OUT = 12


@pytest.fixture(scope="module", params=["absolute_error", "rmse"])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the counting recipe, judged by an error of each answer or of all of them."""
    folder = tmp_path_factory.mktemp("judged")
    benchmark = folder / "errors.yaml"
    benchmark.write_text(
        f"title: Errors\ntask: counting\nmetric: {request.param}\nsplits: {{test: {HELD_OUT}}}\n"
    )
    short = ["optim.max_steps=2", "optim.prompts_per_step=2", "optim.warmup_steps=0"]
    short += [f"data.eval_limit={HELD_OUT}", f"evaluation.benchmark={benchmark}"]
    settings = load_settings("counting", [*short, f"output_dir={folder}", "name=run"])
    train(settings)
    return settings.run_dir


def test_the_page_leads_with_the_error(judged: Path) -> None:
    run = read_run(judged)
    name = json.loads((judged / "evaluation/step-000000.json").read_text())["headline"]
    assert run.primary_metric == name
    change = run.change()
    assert change is not None
    assert change.lower_is_better
    logged = json.loads((judged / "metrics.jsonl").read_text().splitlines()[-1])
    assert change.after == pytest.approx(logged[f"eval/{name}"])
    assert change.n == HELD_OUT

    build_report(judged)
    page = (judged / "report.html").read_text("utf-8")
    words = name.replace("_", " ")
    assert f"{words} on {HELD_OUT} held-out examples; less is better" in page
    fell = " fell" if change.after > change.before else ""
    assert f'<span class="after{fell}">{change.after:.3f}</span>' in page
    assert 'class="scale"' not in page  # an error has no scale from nothing to all
    assert ("95 % bootstrap intervals" in page) == (name == "absolute_error")
    assert ("a metric of the whole set" in page) == (name == "rmse")
    first = charts(run)[0]
    assert first.title == f"Held out: {words}"
    assert "less is better" in first.help
    assert not first.share
    assert (first.lines[0].low is None) == (name == "rmse")


def test_the_card_tells_the_error(judged: Path) -> None:
    run = read_run(judged)
    change = run.change()
    assert change is not None
    card = build_model_card(resolve_model(str(judged)), adapter=False)
    assert f"{run.primary_metric} is an error: lower is better" in card
    assert f"| **{run.primary_metric}** | {change.before:.4f}" in card
    assert "nan" not in card


def test_a_metric_of_the_whole_set_has_a_chart(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, "counting", steps=4, held_out=6))
    drawn = {chart.title: chart for chart in charts(run)}
    root_mean_square = drawn["Held out: rmse"]
    assert root_mean_square.help == "Of the whole of 6 held-out examples."
    summary = json.loads((run.folder / "evaluation/step-000004.json").read_text())
    assert root_mean_square.lines[0].y[-1] == pytest.approx(summary["metrics"]["rmse"])
    parts = drawn["Held out: exact, by part"]
    assert {line.name for line in parts.lines} == {f"of {n}" for n in gold_counts(run)}
    assert parts.share
    assert not any(title.startswith("Held out: exact of") for title in drawn)
    compared = {chart.title for chart in comparison([("a", run), ("b", run)])}
    assert "Held out: rmse" in compared
    assert "Held out: exact, by part" not in compared


def gold_counts(run: Run) -> set[int]:
    return {row["gold"] for row in run.samples if row["source"].startswith("held-out")}


def test_the_evaluations_own_number_comes_first(tmp_path: Path) -> None:
    """As where a benchmark's metric is the mean over means of groups."""
    folder = make_run(tmp_path, "counting", steps=4, held_out=6)
    path = folder / "evaluation/step-000004.json"
    summary = json.loads(path.read_text())
    plain = summary["metrics"]["exact"]
    summary["metrics"]["exact"] = plain / 2 + 0.01
    path.write_text(json.dumps(summary))
    last = read_run(folder).evaluations[-1]
    assert last.mean("exact") == plain / 2 + 0.01
    assert math.isnan(last.interval("exact", 0)[0])  # it would be that of another number


def test_a_mean_over_groups_has_no_interval_of_its_examples(tmp_path: Path) -> None:
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
    assert found.value == pytest.approx(0.5)  # of a mean of 1 and one of 0; the examples' is 2/3
    assert math.isnan(found.interval[0])
    assert str(found) == "word_recognition 50.0% (n = 3)"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"headline": 3, "metrics": {}}', "[" * 9000])
def test_a_broken_summary_is_left_out(text: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "counting", steps=4, held_out=6)
    for path in (folder / "evaluation").glob("*.json"):
        path.write_text(text)
    run: Run = read_run(folder)
    assert run.primary_metric == "exact"  # as the samples have it
    assert run.change() is not None
