"""``vlm-grpo settings``, and settings that are written as options."""

import pytest
from commands import fails

from vlm_grpo.config.recipes import recipe_names
from vlm_grpo.task.registry import task_names


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("optim.lr", "optim.lr: float ≥ 0, default 1e-06\n    Peak learning rate."),
        ("checkpoint", "checkpoint.keep_last: int ≥ 0, default 2\n    Number of newest"),
        ("optim", "Refused: optim.mini_batches=… must divide optim.prompts_per_step=…"),
        ("policy.lora", "policy.lora.r: int ≥ 1, default 64"),
        ("learning_rate", "TRL's learning_rate is optim.lr here.\noptim.lr: float"),
        ("use_vllm", "TRL's use_vllm is rollout.sampler (vllm: docs/vllm.md) here"),
    ],
)
def test_a_setting_a_block_or_a_foreign_name_is_explained(succeed, key, expected):
    assert expected in succeed("settings", key)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--learning_rate", "1e-6"], "TRL's learning_rate is optim.lr here"),
        (["--load-in-4bit=true"], "TRL's load_in_4bit is policy.load_in (4bit or 8bit"),
        (["--optim.lr", "1e-6"], "settings have no dashes, optim.lr=VALUE"),
        (["--model=x"], "settings have no dashes, model=VALUE"),
        (["use_vllm=true"], "unknown key use_vllm: TRL's use_vllm is rollout.sampler (vllm"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan", "evaluate"])
def test_settings_of_other_trainers_are_explained(capsys, command, arguments, expected):
    assert expected in fails(capsys, command, "counting", *arguments)


def test_every_task_and_recipe_is_listed(succeed):
    out = succeed("tasks")
    assert all(name in out for name in (*task_names(), *recipe_names()))
    assert "Count the named objects in one image" in out
    assert "Referring expressions (RefCOCO) with Qwen2.5-VL-3B" in out
    assert "because it has never seen a chart, and then GRPO" in out  # over two lines of the file
