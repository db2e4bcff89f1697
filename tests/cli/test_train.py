"""``vlm-grpo train``: arguments and errors. tests/test_trainer.py covers the training itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from commands import fails, write_jsonl
from fuzz_files import RECIPE


def test_another_task_is_trained_and_its_bad_rows_are_named(capsys, write_letters, tmp_path):
    row = {"id": 1, "question": "?", "images": ["none.png"], "answer": "a"}
    data = write_jsonl(tmp_path / "broken.jsonl", row)
    overrides = [f"data.train={data}", "data.eval=null", "evaluation.every=0"]
    overrides.append(f"output_dir={tmp_path}")

    message = fails(capsys, "train", "counting", *overrides, "--task", write_letters())

    assert f"{data}:1: image none.png is missing" in message


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_is_finished(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    reader, writer = os.pipe()
    os.close(reader)  # as "| head -1" does after the first line
    command = [sys.executable, "-m", "vlm_grpo.cli", "train", "tiny.yaml"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=writer)
    os.close(writer)

    assert done.returncode == 0
    run = tmp_path / "runs" / "tiny"
    assert (run / "checkpoints" / "step-2" / "manifest.json").is_file()
    assert (run / "report.html").is_file()
