"""Each metric has a chart with the right title and scale, and readable colors."""

import json
import math
import re
from importlib import resources

import numpy as np
import pytest
from report_runs import make_run

from vlm_grpo.report.charts import (
    MAX_POINTS,
    Chart,
    Line,
    build_charts,
    build_comparison_charts,
    pack_charts,
)
from vlm_grpo.report.run import read_run


def test_a_run_has_charts_of_its_metrics_and_their_distributions(counting_run, tmp_path):
    run = read_run(counting_run)
    charts = {chart.title: chart for chart in build_charts(run)}
    titles = list(charts)
    assert titles[0] == "Held out: exact"  # the primary metric comes first
    assert {"Reward", "Entropy", "KL to the reference", "Groups with equal rewards"} <= set(titles)
    assert len(build_charts(run)) == len(titles)
    compared = [chart.title for chart in build_comparison_charts([("a", run), ("b", run)])]
    assert "Reward: exact" in compared
    for title in ("Distribution of the reward", "Distribution of the completion length"):
        lines = {line.name: line.y for line in charts[title].lines}
        assert list(lines) == ["90 %", "median", "10 %"]
        rows = [*zip(run.metrics, *lines.values(), strict=True)]
        assert all(lower <= median <= upper for _, upper, median, lower in rows)
    for row, upper, _, lower in rows:  # of the length
        assert row["completions/min_length"] <= lower <= upper <= row["completions/max_length"]
    # A run has the same color in all charts.
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    both = build_comparison_charts([("bare", read_run(tmp_path)), ("full", run)])
    series = {(line.name, line.series) for chart in both for line in chart.lines}
    assert series == {("bare", 0), ("full", 1)}


def test_phases_add_up_to_the_step_without_generation_elsewhere(counting_run, tmp_path):
    chart = next(chart for chart in build_charts(read_run(counting_run)) if chart.stacked)
    names = [line.name for line in chart.lines]
    # The rollout contains the first three.
    assert names == ["prompts", "prefill", "decode", "update", "other"]
    for values in zip(*(line.y for line in chart.lines), strict=True):
        assert sum(values) == pytest.approx(0.41)  # the time per step in the metrics
    # The rollout phase is the wait for the outside sampler, which generates in the background.
    row = {"step": 0, "reward": 0.5, "time/step": 3.0, "time/rollout": 0.5, "time/update": 2.0}
    row |= {"time/generation": 2.5, "staleness/max": 1, "sampling/effective_sample_size": 0.9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    charts = {chart.title: chart for chart in build_charts(read_run(tmp_path))}
    phases = {line.name: line.y for line in charts["Time per step by phase"].lines}
    assert phases == {"rollout": [0.5], "update": [2.0], "other": [0.5]}
    names = {line.name for line in charts["Sampler correction"].lines}
    assert names == {"staleness/max", "effective_sample_size"}


def test_errors_and_corpus_metrics_have_charts(tmp_path):
    run = read_run(make_run(tmp_path, "counting", steps=4, held_out=6, skill=(0.8, 0.9)))
    charts = {chart.title: chart for chart in build_charts(run)}
    error = charts["Held out: absolute error"]
    assert max(error.lines[0].y) < 1  # answers are off by 1 or 2
    assert (charts["Held out: exact"].share, error.share) == (True, False)
    rmse = charts["Held out: rmse"]
    assert rmse.help == "Corpus metric of 6 held-out examples."
    summary = json.loads((run.folder / "evaluation/step-000004.json").read_text())
    assert rmse.lines[0].y[-1] == pytest.approx(summary["metrics"]["rmse"])
    subsets = charts["Held out: exact, by subset"]
    gold_counts = {row["gold"] for row in run.samples if row["source"].startswith("held-out")}
    assert {line.name for line in subsets.lines} == {f"of {n}" for n in gold_counts}
    assert subsets.share
    assert not any(title.startswith("Held out: exact of") for title in charts)
    compared = {chart.title for chart in build_comparison_charts([("a", run), ("b", run)])}
    assert "Held out: rmse" in compared
    assert "Held out: exact, by subset" not in compared


def test_runs_without_usable_distributions_have_no_chart_of_them(tmp_path):
    rows = [{"step": 0, "reward": "high"}, {"step": 1, "reward": [None, "x"]}, {"reward": [1.0]}]
    (tmp_path / "config.yaml").write_text("task: counting\n")
    (tmp_path / "distributions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert build_charts(read_run(tmp_path)) == []


def test_lines_share_their_steps_keep_the_series_of_their_run_and_are_averaged_if_long():
    lines = [
        Line("a", [1, 2], [0.5, math.nan], series=0),
        Line("b", [1, 2], [math.nan, math.inf], series=1),  # without values
        Line("c", [1, 2], [1.0, 2 / 3], series=2),
    ]
    packed = pack_charts([Chart("t", "h", lines), Chart("u", "h", lines[:1])])
    assert packed["xs"] == [(1, 2)]
    names = ("name", "series", "x", "y")
    assert [tuple(line[name] for name in names) for line in packed["charts"][0]["lines"]] == [
        ("a", 0, 0, [0.5, None]),
        ("c", 2, 0, [1.0, 0.6667]),  # four digits
    ]
    for steps, points in ((2000, 2000), (2001, 1001), (9999, 2000)):
        line = Line("a", range(steps), [float(step) for step in range(steps)])
        packed = pack_charts([Chart("t", "h", [line])])
        values = packed["charts"][0]["lines"][0]["y"]
        assert len(values) == len(packed["xs"][0]) == points <= MAX_POINTS
        size = math.ceil(steps / MAX_POINTS)  # the second point is the mean of the second part
        assert values[1] == pytest.approx(size + (size - 1) / 2, rel=1e-3)
        assert packed["xs"][0][1] == pytest.approx(size + (size - 1) / 2)


def test_series_stand_out_from_the_card_in_both_themes():
    css = resources.files("vlm_grpo.report").joinpath("page.css").read_text("utf-8")
    _, light, dark, *_ = css.split("color-scheme:")
    for block in (light, dark):
        names = r"--(card|series-\d): #([0-9a-f]{6})"
        codes = [code for _, code in sorted(re.findall(names, block.partition("}")[0]))]
        rgb = np.array([[int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)] for code in codes])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        card, *series = linear @ [0.2126, 0.7152, 0.0722]  # relative luminance, WCAG 2.2
        for luminance in series:
            low, high = sorted((card, luminance))
            assert (high + 0.05) / (low + 0.05) >= 3  # WCAG 1.4.11
