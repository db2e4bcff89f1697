"""``vlm-grpo train``: arguments and errors."""

from __future__ import annotations

import os
import select

import forked
from commands import fails, write_jsonl
from fuzz_files import RECIPE

from vlm_grpo.cli import main


def test_another_task_is_trained_and_its_bad_rows_are_named(capsys, write_letters, tmp_path):
    row = {"id": 1, "question": "?", "images": ["none.png"], "answer": "a"}
    data = write_jsonl(tmp_path / "broken.jsonl", row)
    overrides = [f"data.train={data}", "data.eval=null", "evaluation.every=0"]
    overrides.append(f"output_dir={tmp_path}")

    message = fails(capsys, "train", "counting", *overrides, "--task", write_letters())

    assert f"{data}:1: image none.png is missing" in message


def test_a_run_whose_output_nobody_reads_is_finished(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    os.mkfifo(tmp_path / "output")
    reader = os.open(tmp_path / "output", os.O_RDONLY | os.O_NONBLOCK)
    words = ["train", str(tmp_path / "tiny.yaml"), f"output_dir={tmp_path}"]
    process = forked.start(tmp_path / "output", main, words)
    select.select([reader], [], [], forked.TIMEOUT)
    os.close(reader)  # as "| head -1" does after the first line
    process.join(forked.TIMEOUT)

    assert process.exitcode == 0
    run = tmp_path / "tiny"
    assert (run / "checkpoints" / "step-2" / "manifest.json").is_file()
    assert (run / "report.html").is_file()
