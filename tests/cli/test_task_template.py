"""The task that ``new-task`` writes loads, is sound, passes its own test, and hides no file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vlm_grpo import cli
from vlm_grpo.cli.task_template import LONGEST_NAME, write_task
from vlm_grpo.errors import UserError
from vlm_grpo.registry import load_task


def test_it_loads_and_is_named_after_its_file(tmp_path: Path) -> None:
    file, _ = write_task("read_clock", tmp_path / "tasks")
    task = load_task(str(file))
    assert type(task).__name__ == "ReadClock"
    assert task.primary_metric in task.reward_weights()
    assert len(file.read_text().splitlines()) < 60  # a task is read at one glance


def test_its_own_test_passes(tmp_path: Path) -> None:
    _, test = write_task("read_clock", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout  # one gold answer and four wrong texts


def test_it_is_sound_on_two_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = write_task("sky", tmp_path)
    data = tmp_path / "data.jsonl"
    rows = [{"id": a, "question": "Which colour?", "answer": a} for a in ("Blue", "grey")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as caught:
        cli.main(["validate", str(file), "--data", str(data)])
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    assert "Sky is sound on this data" in out


@pytest.mark.parametrize("name", ["a", "read_clock", "w" * LONGEST_NAME])
def test_it_is_clean(tmp_path: Path, name: str) -> None:
    files = write_task(name, tmp_path)
    config = Path(__file__).parents[2] / "pyproject.toml"
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", config, *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ReadClock", "small letters"),
        ("2fast", "a letter first"),
        ("read-clock", "small letters"),
        ("../escape", "small letters"),
        ("read__clock", "single underscores"),
        ("clock.py", "small letters"),
        ("", "small letters"),
        ("w" * 41, "40 letters at most"),
        ("class", "word of Python"),
        ("json", "json.py would hide"),
        ("test_clock", "leave out test_"),
    ],
)
def test_a_name_that_would_not_do_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        write_task(name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("there", ["clock.py", "test_clock.py"])
def test_no_file_is_written_over(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(UserError, match=f"{there} exists"):
        write_task("clock", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        write_task("clock", tmp_path / "file")


def test_the_command_says_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["new-task", "clock", "--out", str(tmp_path)])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"vlm-grpo validate {tmp_path / 'clock.py'} --data" in out

    with pytest.raises(SystemExit) as caught:
        cli.main(["new-task", "clock", "--out", str(tmp_path)])
    assert caught.value.code == 2
    assert "exists" in capsys.readouterr().err
