"""The reference of settings: complete, and read from the classes."""

from __future__ import annotations

from vlm_grpo.config.listing import list_blocks, list_refusals, list_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.config.section import known_keys

BY_KEY = {setting.key: setting for setting in list_settings()}


def test_every_setting_is_listed_with_its_docstring() -> None:
    blocks = set(list_blocks())
    assert set(BY_KEY) == set(known_keys(Settings)) - blocks
    assert all(setting.description for setting in BY_KEY.values())
    assert all(list_blocks().values())


def test_a_setting_has_type_bounds_default_and_other_names() -> None:
    rate = BY_KEY["optim.lr"]
    assert (rate.type, rate.default) == ("float ≥ 0", "1e-06")
    assert rate.other_names == ["learning_rate (TRL)", "worker.actor.optim.lr (EasyR1)"]
    assert BY_KEY["data.train"].default is None
    assert BY_KEY["policy.lora.target"].type == "'language' | 'all' | tuple[str, …]"
    assert BY_KEY["rollout.num_generations"].other_names[0] == "num_generations (TRL)"


def test_the_reference_lists_what_each_block_refuses() -> None:
    texts = {block: list_refusals(block) for block in ("", *list_blocks())}
    assert any("rollout.vllm.weight_transfer=ipc needs servers" in t for t in texts["rollout"])
    assert "optim.mini_batches=… must divide optim.prompts_per_step=…" in texts["optim"]
    assert any(text.startswith("task has no value") for text in texts[""])


def test_a_setting_says_whether_a_resumed_run_may_change_it() -> None:
    assert BY_KEY["optim.lr"].on_resume == "A resumed run may change it."
    assert BY_KEY["rollout.vllm.urls"].on_resume == "A resumed run may change it."  # as its block
    assert BY_KEY["data.columns"].on_resume.endswith("if the training examples stay the same.")
    for key in ("optim.name", "objective.beta", "policy.lora.r", "data.filter", "seed"):
        assert not BY_KEY[key].on_resume
