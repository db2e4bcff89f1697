"""Run a command in this process, as a user runs it in a shell, or Python in another one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo import cli

RECIPE = """
task: counting
model: embedded
data: {train: "embedded:counting", eval: "embedded:counting", train_limit: 4, eval_limit: 2}
policy: {dtype: float32}
rollout: {num_generations: 2, max_completion_length: 2}
optim: {lr: 1.0e-4, warmup_steps: 1, prompts_per_step: 2, max_steps: 2}
checkpoint: {every: 1}
logging: {trackers: [], samples_every: 1}
"""
"""A run of two steps."""


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a command and return its exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail with status 2 and no traceback, and return its stderr."""
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "Traceback" not in err
    return err


def run_python(*arguments: object, folder: Path | None = None) -> str:
    """Run Python in a new process, which must end with status 0, and return its stdout."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def write_jsonl(path: Path, *rows: dict[str, Any] | str | bytes) -> Path:
    """Write one line per row: a dict as JSON, a string or bytes as they are."""
    lines = (row if isinstance(row, str | bytes) else json.dumps(row) for row in rows)
    path.write_bytes(b"".join((x.encode() if isinstance(x, str) else x) + b"\n" for x in lines))
    return path
