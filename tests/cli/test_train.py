"""``vlm-grpo train``: arguments and errors. tests/test_trainer.py covers the training itself."""

from __future__ import annotations

from commands import fails, write_jsonl


def test_another_task_is_trained_and_its_bad_rows_are_named(capsys, write_letters, tmp_path):
    row = {"id": 1, "question": "?", "images": ["none.png"], "answer": "a"}
    data = write_jsonl(tmp_path / "broken.jsonl", row)
    overrides = [f"data.train={data}", "data.eval=null", "evaluation.every=0"]
    overrides.append(f"output_dir={tmp_path}")

    message = fails(capsys, "train", "counting", *overrides, "--task", write_letters())

    assert f"{data}:1: image none.png is missing" in message
