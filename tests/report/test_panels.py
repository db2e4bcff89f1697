"""Each metric has a chart with the right title and scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_runs import make_run

from vlm_grpo.report.panels import (
    COLUMNS,
    build_charts,
    build_comparison_charts,
    build_distribution_charts,
    build_heat_map,
)
from vlm_grpo.report.run import read_run


def test_run_has_charts_of_its_metrics(counting_run: Path) -> None:
    run = read_run(counting_run)
    titles = [chart.title for chart in build_charts(run)]
    assert titles[0] == "Held out: exact"  # the primary metric comes first
    for title in ("Reward", "Entropy", "KL to the reference", "Groups with equal rewards"):
        assert title in titles
    assert len(set(titles)) == len(titles)
    compared = [chart.title for chart in build_comparison_charts([("a", run), ("b", run)])]
    assert "Reward: exact" in compared
    assert "Distribution of the reward" in titles
    assert "Distribution of the reward: b" in compared


def test_a_run_has_the_same_color_in_all_charts(counting_run: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    runs = [("bare", read_run(tmp_path)), ("full", read_run(counting_run))]
    for chart in build_comparison_charts(runs):
        series = {line.name: line.series for line in chart.lines if chart.heat is None}
        assert series.get("full", 1) == 1
        assert series.get("bare", 0) == 0


def test_phases_add_up_to_the_step(counting_run: Path) -> None:
    chart = next(chart for chart in build_charts(read_run(counting_run)) if chart.stacked)
    names = [line.name for line in chart.lines]
    # The rollout contains the first three.
    assert names == ["prompts", "prefill", "decode", "update", "other"]
    for values in zip(*(line.y for line in chart.lines), strict=True):
        assert sum(values) == pytest.approx(0.41)  # the time per step in the metrics


def test_generation_elsewhere_is_not_a_part_of_the_step(tmp_path: Path) -> None:
    """The step waits for an outside sampler in its rollout, while the generation goes on beside."""
    row = {"step": 0, "reward": 0.5, "time/step": 3.0, "time/rollout": 0.5, "time/update": 2.0}
    row |= {"time/generation": 2.5, "staleness/max": 1, "sampling/effective_sample_size": 0.9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    charts = {chart.title: chart for chart in build_charts(read_run(tmp_path))}
    phases = {line.name: line.y for line in charts["Time per step by phase"].lines}
    assert phases == {"rollout": [0.5], "update": [2.0], "other": [0.5]}
    names = {line.name for line in charts["Sampler correction"].lines}
    assert names == {"staleness/max", "effective_sample_size"}


def test_mean_error_below_one_is_not_a_percentage(tmp_path: Path) -> None:
    run = make_run(tmp_path, "counting", steps=4, skill=(0.8, 0.9))
    shares = {chart.title: chart.share for chart in build_charts(read_run(run))}
    assert shares["Held out: exact"]
    assert not shares["Held out: absolute error"]  # answers are off by 1 or 2


def test_corpus_metric_has_a_chart(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, "counting", steps=4, held_out=6))
    charts = {chart.title: chart for chart in build_charts(run)}
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


def test_few_values_have_a_row_each_and_many_share_rows_and_columns() -> None:
    heat = build_heat_map({0: [0.0, 0.0, 0.0, 1.0], 1: [0.0, 1.0, 1.0, 1.0]})
    assert heat.edges == heat.bins == [-0.5, 0.5, 1.5]
    assert heat.shares == [[0.75, 0.25], [0.25, 0.75]]
    assert heat.ticks == [0.0, 1.0]
    assert build_heat_map({3: [2.0]}).bins == [1.5, 2.5]
    heat = build_heat_map({step: [float(i) for i in range(48)] for step in range(2 * COLUMNS)})
    assert len(heat.shares) == COLUMNS
    assert heat.edges[:2] == [-0.5, 1.5]  # two steps per column
    assert heat.shares[0] == pytest.approx([1 / 24] * 24)  # 48 values in 24 rows
    assert (heat.bins[0], heat.bins[-1]) == (0.0, 47.0)
    assert heat.ticks is None


def test_charts_show_what_the_run_has_recorded(counting_run: Path) -> None:
    run = read_run(counting_run)
    charts = {chart.title: chart for chart in build_distribution_charts(run)}
    assert set(charts) == {"Distribution of the reward", "Distribution of the completion length"}
    rewards = charts["Distribution of the reward"]
    assert rewards.heat is not None
    assert rewards.heat.ticks is not None
    for row, shares in zip(run.metrics, rewards.heat.shares, strict=True):
        expected = sum(s * value for s, value in zip(shares, rewards.heat.ticks, strict=True))
        assert expected == pytest.approx(row["reward"])  # 32 completions: all of them are kept
    lengths = charts["Distribution of the completion length"]
    medians = next(line for line in lengths.lines if line.name == "median")
    for row, median in zip(run.metrics, medians.y, strict=True):
        assert row["completions/min_length"] <= median <= row["completions/max_length"]


def test_runs_without_usable_distributions_have_no_heat_map(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: counting\n")
    assert list(build_distribution_charts(read_run(tmp_path))) == []
    rows = [{"step": 0, "reward": "high"}, {"step": 1, "reward": [None, "x"]}, {"reward": [1.0]}]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "distributions.jsonl").write_text(text)
    assert list(build_distribution_charts(read_run(tmp_path))) == []
