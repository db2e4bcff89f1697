"""Heat maps of rewards and lengths have the recorded shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlm_grpo.report.distributions import COLUMNS, build_distribution_charts, build_heat_map
from vlm_grpo.report.run import read_run


def test_few_values_have_a_row_each() -> None:
    heat = build_heat_map({0: [0.0, 0.0, 0.0, 1.0], 1: [0.0, 1.0, 1.0, 1.0]})
    assert heat.edges == [-0.5, 0.5, 1.5]
    assert heat.bins == [-0.5, 0.5, 1.5]
    assert heat.shares == [[0.75, 0.25], [0.25, 0.75]]
    assert heat.ticks == [0.0, 1.0]
    assert build_heat_map({3: [2.0]}).bins == [1.5, 2.5]


def test_many_values_share_rows_and_many_steps_share_columns() -> None:
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
