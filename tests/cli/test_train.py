"""``vlm-grpo train`` and ``vlm-grpo sft``: arguments, errors and the folder of a run."""

import json
import os
import select

import forked
from commands import RECIPE, fails, write_jsonl

from vlm_grpo.cli import main
from vlm_grpo.cli.train import UNUSED
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import known_keys


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


def test_a_recipe_is_trained_on_its_gold_answers(succeed, capsys, tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    words = "sft", tmp_path / "tiny.yaml", f"output_dir={tmp_path}", "warm_start.lr=1e-3"
    out = succeed(*words)
    assert "warm start 2 steps on the gold answers of 2 prompts, lr 0.001, linear; then" in out
    folder = tmp_path / "tiny-sft"  # that of train is tiny
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all("mean_token_accuracy" in row and "reward" not in row for row in rows)
    assert "Token accuracy" in (folder / "report.html").read_text("utf-8")
    assert (folder / "checkpoints/step-2/manifest.json").is_file()
    assert "resume=true" in fails(capsys, *words)


def test_settings_that_it_does_not_read_are_refused_and_exist(capsys):
    for key in ("optim.lr", "objective.beta", "warm_start.steps"):
        message = fails(capsys, "sft", "counting", f"{key}=1")
        assert f"{key} has no effect on supervised steps" in message
        assert "warm_start.lr" in message
    assert set(UNUSED) <= set(known_keys(Settings))


def test_a_target_that_is_too_long_names_its_line(capsys, tmp_path):
    row = {"id": "a", "question": "?", "answer": 3, "completion": "three shapes"}
    data = write_jsonl(tmp_path / "rows.jsonl", {**row, "id": "b", "completion": "3"}, row)
    words = f"data.train={data}", "data.eval=null", "evaluation.every=0", f"output_dir={tmp_path}"
    message = fails(capsys, "sft", "counting", *words)
    assert f"{data}:2: example a: its target 'three shapes' has" in message
    assert "rollout.max_completion_length=4" in message
    assert "data.on_bad_row=skip" in message
