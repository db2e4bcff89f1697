"""Random commands, in this process; tests/helpers/fuzz_cli.py runs all of them, by the thousand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from commands import run
from fuzz_cli import (
    COMMANDS,
    RUNS,
    draw_invocation,
    find_problems,
    read_state,
    write_files,
    write_mutants,
)

from vlm_grpo.cli.app import app

FAST = ("report", "settings", "new-task", "check", "evaluate  ", "tasks")
"""The commands that load no model."""


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for name in RUNS:
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_bytes((tmp_path / "tiny.yaml").read_bytes())
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    write_mutants(random.Random(0))


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("command", FAST)
def test_random_arguments_end_in_a_result_or_one_message(command, capsys, tmp_path):
    for number in range(10):
        words = draw_invocation(random.Random(f"{command}-{number}"), [command])
        before = read_state(tmp_path)
        status, out, err = run(capsys, *words)
        problems = list(find_problems(words, status, out + err, before, read_state(tmp_path)))
        assert problems == [], f"{words}\n{err}"


def test_every_command_is_in_the_fuzz():
    names = {getattr(command.callback, "__name__", "") for command in app.registered_commands}
    fuzzed = {command.split()[0].replace("-", "_") for command in COMMANDS} - {"data"}
    assert names == fuzzed
