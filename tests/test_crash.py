"""A run that is killed at any time resumes to the same result; see ``helpers/crash.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one() -> None:
    script = Path(__file__).parent / "helpers" / "crash.py"
    command = [sys.executable, str(script), "--kills", "3", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("3 kills of a run of 9 steps")
    assert "the same weights, metrics and samples" in done.stdout
