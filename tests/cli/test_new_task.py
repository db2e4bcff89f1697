"""``vlm-grpo new-task``: the printed next steps, and a name in use. See test_task_template.py."""

from __future__ import annotations

import shlex

from commands import fails, run

from vlm_grpo.config.recipes import load_settings


def test_the_next_commands_are_printed(capsys, tmp_path):
    status, out, _ = run(capsys, "new-task", "clock", "--out", tmp_path)

    assert status == 0
    assert f"vlm-grpo check {tmp_path / 'clock.py'} --data" in out
    command = out.partition("vlm-grpo train ")[2].replace("\\\n", " ")
    recipe, *overrides = shlex.split(command)
    settings = load_settings(recipe, overrides)  # nothing is missing in it
    assert settings.model == "Qwen/Qwen2.5-VL-3B-Instruct"


def test_an_existing_file_is_one_message(capsys, tmp_path):
    run(capsys, "new-task", "clock", "--out", tmp_path)

    assert "exists" in fails(capsys, "new-task", "clock", "--out", tmp_path)
