"""What the console, the page and a comparison say of a mixture comes from the same numbers."""

from pathlib import Path
from typing import Any

import pytest
from small_tasks import Distance

from vlm_grpo import TrainResult, load_task
from vlm_grpo.data.mixed_task import Mixed
from vlm_grpo.eval.scored import summarize
from vlm_grpo.report.charts import build_charts, build_comparison_charts
from vlm_grpo.report.comparison import build_pairs
from vlm_grpo.report.page import build_report
from vlm_grpo.report.run import Run, measure_change, read_run
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Completion, Example

TASK = Mixed(members={"c": load_task("counting"), "e": Distance()})


def make_run(folder: Path, counts: int, *outputs: str) -> Run:
    """Write a run with evaluations of this many counts and of two distances."""
    sizes = {"c": counts, "e": 2}
    examples = [
        Example(f"{source}/{n}", (), "?", n, source=source)
        for source, size in sizes.items()
        for n in range(size)
    ]
    (folder / "evaluation").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: mixed\n")
    for step, texts in enumerate(map(str.split, outputs)):
        with RewardScorer() as scorer:
            scores = scorer(TASK, texts, examples)
        found = summarize(TASK, examples, [*map(Completion.from_text, texts)], scores, 0)
        found.write(folder / "evaluation" / f"step-{step:06d}.jsonl")
    return read_run(folder)


def test_the_console_the_page_charts_and_comparisons_have_the_same_examples_and_interval(tmp_path):
    run = make_run(tmp_path / "long", 6, "0 1 9 9 9 9 0.5 1.75", "0 1 2 3 9 9 0.25 1.5")
    runs = [("long", run), ("short", make_run(tmp_path / "short", 3, "9 9 9 0.5 1", "0 1 9 0.5 1"))]
    before, after = run.evaluations
    change: Any = run.change()
    assert (change.n, change.after_interval) == (8, after.interval)
    result = str(TrainResult(before, after, None, run.folder / "step-1", run.folder))
    assert f"after      {after}\n             c/exact 66.7% [" in result
    assert " (n = 8)\n             c/exact 66.7% [" in result
    assert "\n             e/error 0.375 [0.250, 0.500] (n = 2)\n" in result
    low, high = change.difference_interval
    assert f"[{100 * low:+.1f}, {100 * high:+.1f}]" in result
    page = build_report(run.folder).read_text("utf-8")
    assert "score on 8 held-out examples" in page
    assert "for the difference" in page
    assert "no example in common" not in page

    charts = {chart.title: chart for chart in build_charts(run)}
    expected = {
        "score": "Mean of the sources, of 8 held-out examples, with its 95 % interval.",
        "c/exact": "Mean over 6 held-out examples, with its 95 % interval.",
        "c/rmse": "Corpus metric of 6 held-out examples.",
        "e/error": "Mean over 2 held-out examples, with its 95 % interval; lower is better.",
    }
    assert {n: charts[f"Held out: {n}"].help for n in expected} == expected
    (line,) = charts["Held out: score"].lines
    assert [*zip(line.low or [], line.high or [], strict=True)] == [
        evaluation.interval for evaluation in run.evaluations
    ]
    # A comparison tests the examples in common, and names both numbers.
    compared = {chart.title: chart.help for chart in build_comparison_charts(runs)}
    counted = "Mean of the sources, of 5 to 8 held-out examples"
    assert compared["Held out: score"].startswith(counted)
    (pair,) = build_pairs(runs)
    test = pair["tests"][0]
    assert (pair["primary"], test["name"], test["n"], pair["n"]) == ("score", "score", 5, 5)
    # Of the three counts in common 3 and 2 are right; the errors are 0.25, 0.5 and 0.5, 0.
    assert test["a"] == pytest.approx((1 + 1 - 0.375) / 2)
    assert test["b"] == pytest.approx((2 / 3 + 1 - 0.25) / 2)
    first, second = (run.evaluations[-1] for _, run in runs)
    change = measure_change(first, second, "score")
    assert change is not None
    assert change.difference == pytest.approx(test["b"] - test["a"])
    assert test["interval"] == change.difference_interval
    assert {flip["id"] for flip in pair["flips"]} == {"c/2", "e/0", "e/1"}
