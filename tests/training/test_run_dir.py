"""A resumed run writes the same metrics and alarms as one that was not interrupted."""

import fcntl
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.eval.scored import Row, Scored
from vlm_grpo.task.registry import load_task
from vlm_grpo.training import run_dir
from vlm_grpo.training.run_dir import RunDir, lock_run
from vlm_grpo.training.trainer import train
from vlm_grpo.utils.jsonl import read_rows

STEPS = 70


def write_steps(settings: Settings, start: int, stop: int) -> None:
    """Write steps in which entropy falls to nothing; from step 30 to 40 all is truncated."""
    task = load_task("counting")
    folder = RunDir(settings, task, task, is_main=True)
    folder.open(start)
    for step in range(start, stop):
        clipped = 0.9 if 30 <= step < 40 else 0.0
        metrics = {"entropy": 0.5 * 0.9**step, "completions/clipped_ratio": clipped}
        folder.write_metrics(step, metrics)
    folder.trackers.finish()


@pytest.fixture
def build_run(tmp_path: Path) -> Any:
    data = DataSettings(train="embedded:counting")
    return partial(Settings, task="counting", output_dir=tmp_path, data=data)


# Killed before the first alarm, between the two, while one is active, and after both; the newest
# checkpoint is one step, or many, behind the log.
@pytest.mark.parametrize("killed", [10, 33, 38, 45, 69])
@pytest.mark.parametrize("behind", [1, 9])
def test_a_resumed_run_has_the_alarms_of_an_uninterrupted_one(build_run, killed, behind, caplog):
    uninterrupted, resumed = build_run(name="uninterrupted"), build_run(name="resumed")
    write_steps(uninterrupted, 0, STEPS)
    logged = caplog.text
    write_steps(resumed, 0, killed)
    write_steps(resumed, killed - behind, STEPS)
    expected, found = (read_rows(r.run_dir / "alarms.jsonl") for r in (uninterrupted, resumed))
    assert [alarm["name"] for alarm in expected] == ["cut off", "entropy collapse"]
    assert set(expected[0]) == {"step", "name", "message", "remedy"}
    assert found == expected
    assert logged.count("cut off:") == 1
    assert f"step {expected[0]['step']}: cut off:" in logged


def test_the_first_rank_builds_a_report_when_the_last_one_is_a_minute_old(build_run, monkeypatch):
    task, now, built = load_task("counting"), [1000.0], []
    monkeypatch.setattr(run_dir.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_dir, "build_report", lambda path: built.append(now[0]))
    ranks = [RunDir(build_run(name="run"), task, task, is_main=main) for main in (True, False)]
    for moment in (1000.0, 1059.0, 1061.0, 1062.0, 1122.0):
        now[0] = moment
        for rank in ranks:
            rank.refresh_report()
    assert built == [1061.0, 1122.0]


def test_a_run_in_use_is_refused_and_unchanged(build_run):
    run = build_run(name="run", resume=True)
    write_steps(run, 0, 2)
    (run.run_dir / "checkpoints" / ".step-3.tmp").mkdir(parents=True)  # being written
    (run.run_dir / "checkpoints" / "step-2").mkdir()  # corrupt: a resume would rename it
    with (run.run_dir / ".lock").open("w", buffering=1) as holder:  # as another process holds it
        fcntl.flock(holder, fcntl.LOCK_EX)
        holder.write("process 7\n")
        before = sorted(run.run_dir.rglob("*"))
        with pytest.raises(UserError, match="in use by process 7"):
            train(run)
        assert sorted(run.run_dir.rglob("*")) == before


def test_a_folder_that_cannot_be_written_to_is_named_with_its_settings(build_run, tmp_path):
    (tmp_path / "file").touch()
    for name, folder in (("run", tmp_path / "file"), ("x" * 300, tmp_path), ("file", tmp_path)):
        run = build_run(name=name, output_dir=folder)
        message = r"the run's folder .* \(.*\): set output_dir or name"
        with pytest.raises(UserError, match=message), lock_run(run, Accelerator(cpu=True)):
            pass


@pytest.mark.parametrize("metric", ["absolute_error", "rmse"])
def test_alarms_monitor_the_held_out_metric_if_completions_have_it(build_run, tmp_path, metric):
    path = tmp_path / "benchmark.yaml"
    path.write_text(f"title: Errors\ntask: counting\nmetric: {metric}\n")
    task, held_out_task = load_task("counting"), load_benchmark(str(path)).load_task()
    monitored = RunDir(build_run(name="run"), task, held_out_task, is_main=True).monitored
    if metric == "absolute_error":
        assert (monitored.primary_metric, monitored.lower_is_better) == (metric, True)
    else:  # of the full set: no completion has a value
        assert monitored is task


def test_an_evaluation_is_read_as_it_was_written(build_run):
    task = load_task("counting")
    run_dir = RunDir(build_run(name="run"), task, task, is_main=True)
    values = (0.0, 1.0, 1.0, 0.0, None)
    rows = tuple(
        Row(id=str(n), output="", answer=None, reward=value, rewards={"exact": value}, metrics={})
        for n, value in enumerate(values)
    )
    written = Scored(rows, "exact", {"exact": 0.5})
    run_dir.write_evaluation(0, task, written, ())
    run_dir.write_evaluation(9, task, replace(written, metrics={"exact": 0.75}), ())
    assert run_dir.monitor.held_out_before == 0.5  # for the alarm of overfitting
    assert run_dir.read_evaluation(0) == written
    assert run_dir.read_evaluation(1) is None
    for text in ("", "[]", "{}", '{"headline": "exact", "n": 9, "metrics": {}}'):
        (run_dir.path / "evaluation/step-000000.json").write_text(text)
        assert run_dir.read_evaluation(0) is None
