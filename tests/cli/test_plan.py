"""``vlm-grpo plan``: arguments. tests/planning covers the estimates."""

from __future__ import annotations

from commands import fails, run


def test_a_plan_is_printed_for_a_gpu_by_its_memory(capsys):
    status, out, _ = run(capsys, "plan", "counting", "data.train_limit=4", "--gpu", "24GB")

    assert status == 0
    assert "a GPU of 24 GB" in out


def test_wrong_arguments_are_one_message(capsys):
    assert "is not in the table" in fails(capsys, "plan", "counting", "--gpu", "X9")
    assert "--devices" in fails(capsys, "plan", "counting", "--devices", "0")
