"""``vlm-grpo tasks``."""

from __future__ import annotations

from commands import run

from vlm_grpo.config.recipes import recipe_names
from vlm_grpo.task.registry import task_names


def test_every_task_and_recipe_is_listed(capsys):
    _, out, _ = run(capsys, "tasks")

    assert all(name in out for name in (*task_names(), *recipe_names()))
    assert "Count the named objects in one image" in out
    assert "Referring expressions (RefCOCO) with Qwen2.5-VL-3B" in out
