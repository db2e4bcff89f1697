"""What a run writes step by step, and that a resumed run writes what an unbroken one would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.config.run import Settings
from vlm_grpo.registry import load_task
from vlm_grpo.tracking.run_dir import RunFolder

STEPS = 70


def row(step: int) -> dict[str, float]:
    """Entropy falls to nothing; completions are cut off from step 30 to 40."""
    return {
        "entropy": 0.5 * 0.9**step,
        "completions/clipped_ratio": 0.9 if 30 <= step < 40 else 0.0,
    }


def folder_of(settings: Settings) -> RunFolder:
    task = load_task("counting")
    return RunFolder(settings, task, task, is_main=True)


def write(settings: Settings, start: int, stop: int) -> None:
    folder = folder_of(settings)
    folder.open(start)
    for step in range(start, stop):
        folder.write_metrics(step, row(step))
    folder.trackers.finish()


def alarms_of(settings: Settings) -> list[dict[str, Any]]:
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


# Killed before the first alarm, between the two, while one is on, and after both; the checkpoint
# is then one step, or many, behind what had been written.
@pytest.mark.parametrize("killed", [10, 33, 38, 45, 69])
@pytest.mark.parametrize("behind", [1, 9])
def test_a_resumed_run_has_the_alarms_of_an_unbroken_one(
    settings: Any, killed: int, behind: int
) -> None:
    unbroken, broken = settings("unbroken"), settings("broken")
    write(unbroken, 0, STEPS)
    write(broken, 0, killed)
    write(broken, killed - behind, STEPS)

    expected = alarms_of(unbroken)
    assert [alarm["name"] for alarm in expected] == ["cut off", "entropy collapse"]
    assert set(expected[0]) == {"step", "name", "message", "remedy"}
    assert alarms_of(broken) == expected


def test_an_alarm_is_a_line_in_the_log(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    write(settings("run"), 0, STEPS)
    (step,) = [alarm["step"] for alarm in alarms_of(settings("run")) if alarm["name"] == "cut off"]
    assert f"step {step}: cut off:" in caplog.text
    assert caplog.text.count("cut off:") == 1


def test_other_ranks_write_nothing(settings: Any) -> None:
    task = load_task("counting")
    folder = RunFolder(settings("run"), task, task, is_main=False)
    folder.open(0)
    folder.write_metrics(0, row(0))
    folder.close()
    assert not folder.path.exists()
