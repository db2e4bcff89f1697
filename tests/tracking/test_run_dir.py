"""A resumed run writes the same metrics and alarms as one that was not interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.benchmarks import load_benchmark
from vlm_grpo.config.run import Settings
from vlm_grpo.registry import load_task
from vlm_grpo.tracking.run_dir import RunDir

STEPS = 70


def make_row(step: int) -> dict[str, float]:
    """Entropy falls to nothing; completions are truncated from step 30 to 40."""
    return {
        "entropy": 0.5 * 0.9**step,
        "completions/clipped_ratio": 0.9 if 30 <= step < 40 else 0.0,
    }


def write_steps(settings: Settings, start: int, stop: int) -> None:
    task = load_task("counting")
    run_dir = RunDir(settings, task, task, is_main=True)
    run_dir.open(start)
    for step in range(start, stop):
        run_dir.write_metrics(step, make_row(step))
    run_dir.trackers.finish()


def read_alarms(settings: Settings) -> list[dict[str, Any]]:
    lines = (settings.run_dir / "alarms.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    def named(name: str) -> Settings:
        values = {"train": "embedded:counting"}
        return Settings.model_validate(
            {"name": name, "task": "counting", "output_dir": tmp_path, "data": values}
        )

    return named


# Killed before the first alarm, between the two, while one is active, and after both; the newest
# checkpoint is one step, or many, behind the log.
@pytest.mark.parametrize("killed", [10, 33, 38, 45, 69])
@pytest.mark.parametrize("behind", [1, 9])
def test_a_resumed_run_has_the_alarms_of_an_uninterrupted_one(
    settings: Any, killed: int, behind: int
) -> None:
    uninterrupted, resumed = settings("uninterrupted"), settings("resumed")
    write_steps(uninterrupted, 0, STEPS)
    write_steps(resumed, 0, killed)
    write_steps(resumed, killed - behind, STEPS)

    expected = read_alarms(uninterrupted)
    assert [alarm["name"] for alarm in expected] == ["cut off", "entropy collapse"]
    assert set(expected[0]) == {"step", "name", "message", "remedy"}
    assert read_alarms(resumed) == expected


def test_an_alarm_is_logged_once(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    write_steps(settings("run"), 0, STEPS)
    alarms = read_alarms(settings("run"))
    (step,) = [alarm["step"] for alarm in alarms if alarm["name"] == "cut off"]
    assert f"step {step}: cut off:" in caplog.text
    assert caplog.text.count("cut off:") == 1


def test_other_ranks_write_nothing(settings: Any) -> None:
    task = load_task("counting")
    run_dir = RunDir(settings("run"), task, task, is_main=False)
    run_dir.open(0)
    run_dir.write_metrics(0, make_row(0))
    run_dir.close()
    assert not run_dir.path.exists()


@pytest.mark.parametrize("metric", ["absolute_error", "rmse"])
def test_alarms_monitor_the_held_out_metric_if_completions_have_it(
    settings: Any, tmp_path: Path, metric: str
) -> None:
    path = tmp_path / "benchmark.yaml"
    path.write_text(f"title: Errors\ntask: counting\nmetric: {metric}\n")
    task, held_out_task = load_task("counting"), load_benchmark(str(path)).load_task()
    monitored = RunDir(settings("run"), task, held_out_task, is_main=True).monitored
    if metric == "absolute_error":
        assert (monitored.primary_metric, monitored.lower_is_better) == (metric, True)
    else:  # of the full set: no completion has a value
        assert monitored is task
