"""A run that is killed at any time resumes to the same result; see ``helpers/crash.py``."""

from __future__ import annotations

import crash
import forked
import pytest


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path):
    output = tmp_path / "output"
    process = forked.start(output, crash.main, ["--kills", "2", "--seed", "1"])
    process.join(500)
    assert process.exitcode == 0, output.read_text()
    assert "2 kills of a run of 6 steps" in output.read_text()
    assert "the same weights, metrics and samples" in output.read_text()
