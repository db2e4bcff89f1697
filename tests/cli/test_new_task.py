"""``vlm-grpo new-task``: the printed next steps, and a name in use. See test_task_template.py."""

from __future__ import annotations

from commands import fails, run


def test_the_next_commands_are_printed(capsys, tmp_path):
    status, out, _ = run(capsys, "new-task", "clock", "--out", tmp_path)

    assert status == 0
    assert f"vlm-grpo validate {tmp_path / 'clock.py'} --data" in out


def test_an_existing_file_is_one_message(capsys, tmp_path):
    run(capsys, "new-task", "clock", "--out", tmp_path)

    assert "exists" in fails(capsys, "new-task", "clock", "--out", tmp_path)
