"""The base of settings: dotted keys, nested values, wrong values, and the reference."""

from typing import Any

import pytest

from vlm_grpo import Settings, UserError, load_settings
from vlm_grpo.config.listing import list_blocks, list_refusals, list_settings
from vlm_grpo.config.section import known_keys, merge

BY_KEY = {setting.key: setting for setting in list_settings()}


def get_error(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_settings("counting", overrides)
    return str(caught.value)


def test_merge_leaves_the_merged_values_unchanged():
    recipe = {"optim": {"lr": 1}}
    target: dict[str, Any] = {}
    merge(target, recipe)
    merge(target, {"optim.lr": 2, "policy": None})
    merge(target, {"policy.lora": {}})
    assert target == {"optim": {"lr": 2}, "policy": {"lora": {}}}
    assert recipe == {"optim": {"lr": 1}}
    # Dots inside the mapping of an option are kept.
    target = {"task_options": {"tags": True}}
    merge(target, {"task_options.labels": {"a.b": {"c.d": 1}}, "task_options": {"x": {"y.z": 2}}})
    assert target["task_options"] == {"tags": True, "labels": {"a.b": {"c.d": 1}}, "x": {"y.z": 2}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("cuda_graphs=true", "cuda_graphs (did you mean rollout.cuda_graphs?)"),  # without block
        ("rollout.num_generation=4", "num_generation (did you mean rollout.num_generations?)"),
        ("optim.num_epochs=3", "unknown key optim.num_epochs (did you mean optim.num_train_epochs"),
        ("rollout.batch_size=4", "unknown key rollout.batch_size\n"),  # not torch_compile
        ("optm={}", "unknown key optm (did you mean optim?)"),
        ("zebra=1", "unknown key zebra\n"),  # nothing is suggested
        ("optim.leraning_rate=1", "optim.leraning_rate: TRL's learning_rate is optim.lr here"),
        ("optim.lr=abc", 'optim.lr="abc" should be a number'),
        ("seed=true", "seed=true should be a whole number"),
        ("rollout.num_generations='4'", 'num_generations="4" should be a whole number'),
        ("rollout.stop=end", 'rollout.stop="end" should be a list'),
        ("policy.dtype=fp16", "should be 'float32' or 'bfloat16'"),
        ("policy.lora.target=3", "policy.lora.target=3 should be 'language' or 'all' or be a list"),
        ("data=null", "data=null should be a mapping of keys"),
        ("rollout.num_generations=1", "rollout.num_generations=1 should be greater than or equal"),
        ("optim.lr=.inf", "should be a finite number"),
        ("name=../up", 'name="../up" should match'),
        ("seed.x=1", 'seed={"x": 1} should be a whole number'),
        ("objective.loss_type=ppo", 'objective.loss_type="ppo" should be'),
        ("optim.betas=[0.9]", "optim.betas=[0.9] should have 2 items"),
        ("optim.betas=[0.9,0.99,1]", "optim.betas=[0.9, 0.99, 1] should have at most 2 items"),
        ("seed=[", "counting cannot be read"),
        (f"seed={'[' * 1000}{']' * 1000}", "counting cannot be read"),
        (f"seed={'9' * 5000}", "counting cannot be read"),
        ("optim=[1]", "recipe counting cannot be read: "),
        ("quickly", "'quickly'"),
        ("=3", "'=3'"),
    ],
    ids=lambda text: text[:30],
)
def test_overrides_with_a_wrong_name_value_or_form_are_refused_all_at_once(override, expected):
    assert expected in f"{get_error(override)}\n"
    message = get_error("optim.lr=abc", "zebra=1", "policy.dtype=fp16")
    assert message.count("\n  - ") == 3
    assert all(key in message for key in ("optim.lr", "zebra", "policy.dtype"))


def test_every_setting_is_listed_with_its_docstring_and_what_its_block_refuses():
    blocks = set(list_blocks())
    assert set(BY_KEY) == set(known_keys(Settings)) - blocks
    assert all(setting.description for setting in BY_KEY.values())
    assert all(list_blocks().values())
    texts = {block: list_refusals(block) for block in ("", *blocks)}
    assert any("rollout.vllm.weight_transfer=ipc needs servers" in t for t in texts["rollout"])
    assert any(text.startswith("task has no value") for text in texts[""])


def test_a_setting_has_type_bounds_default_other_names_and_what_a_resumed_run_may_do():
    rate = BY_KEY["optim.lr"]
    assert (rate.type, rate.default) == ("float ≥ 0", "1e-06")
    assert rate.other_names == ["learning_rate (TRL)", "worker.actor.optim.lr (EasyR1)"]
    assert BY_KEY["data.train"].default is None
    assert BY_KEY["policy.lora.target"].type == "'language' | 'all' | tuple[str, …]"
    assert BY_KEY["rollout.num_generations"].other_names[0] == "num_generations (TRL)"
    for key in ("optim.lr", "rollout.vllm.urls"):  # the second as its block
        assert BY_KEY[key].on_resume == "A resumed run may change it."
    assert BY_KEY["data.columns"].on_resume.endswith("if the training examples stay the same.")
    for key in ("optim.name", "objective.beta", "policy.lora.r", "data.filter", "seed"):
        assert not BY_KEY[key].on_resume
