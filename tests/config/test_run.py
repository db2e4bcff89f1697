"""Settings: what is refused and how it is said, and that a saved run can be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vlm_grpo.config.base import known_keys
from vlm_grpo.config.run import Settings, load_settings, recipe_names
from vlm_grpo.errors import UserError

DATA = ["data.train=train.jsonl", "data.eval=test.jsonl"]
"""What a recipe for a real model leaves to its user."""


def refusal(*overrides: str, recipe: str = "counting") -> str:
    with pytest.raises(UserError) as caught:
        load_settings(recipe, overrides)
    return str(caught.value)


def test_later_overrides_win_over_earlier_ones_and_over_the_recipe():
    settings = load_settings("counting", ["optim.lr=1e-6", "optim.lr=3e-6", "policy.lora.r=4"])

    assert settings.optim.lr == 3e-6
    assert settings.policy.lora is not None
    assert settings.policy.lora.r == 4
    assert settings.rollout.max_completion_length == 4  # the recipe's own
    assert settings.rollout.top_p == 1.0  # the default


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        load_settings("counting").seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_loads_and_comes_back_equal_from_the_file_it_saves(recipe, tmp_path):
    settings = load_settings(recipe, DATA)
    path = tmp_path / "run" / "config.yaml"

    settings.save(path)

    assert load_settings(str(path)) == settings
    assert settings.name == recipe


def test_text_that_yaml_and_omegaconf_give_a_meaning_survives_saving(tmp_path):
    values = load_settings("counting").model_dump()
    values["rollout"]["stop"] = ("${x}", "null", "3", "a: b", "\n", "é", "???x")
    settings = Settings.model_validate(values)
    path = tmp_path / "config.yaml"

    settings.save(path)

    assert load_settings(str(path)) == settings


@pytest.mark.parametrize(
    ("overrides", "name"),
    [([], "counting"), (["task=my_tasks/parity.py"], "parity"), (["name=mine"], "mine")],
)
def test_a_run_is_named_after_its_recipe_or_its_task(overrides, name):
    assert load_settings("counting", overrides).run_dir.name == name


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("num_generations=4", "rollout.num_generations"),  # TRL's flat name
        ("learning_rate=1e-6", "optim.lr"),  # TRL's name for it
        ("rollout.num_generation=4", "rollout.num_generations"),
        ("policy.lora.rank=3", "policy.lora.r"),
        ("optm={}", "optim"),
        ("zebra=1", None),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(override, meant):
    message = refusal(override)

    assert f"unknown key {override.partition('=')[0]}" in message
    assert (f"did you mean {meant}?" in message) if meant else ("did you mean" not in message)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
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
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(override, expected):
    assert expected in refusal(override)


def test_all_problems_are_told_at_once():
    message = refusal("optim.lr=abc", "zebra=1", "policy.dtype=fp16")

    assert message.count("\n  - ") == 3
    assert all(key in message for key in ("optim.lr", "zebra", "policy.dtype"))


@pytest.mark.parametrize(
    ("overrides", "culprits"),
    [
        (["rollout.top_p=0.9"], ["top_p", "sampler_correction"]),
        (["rollout.top_k=50"], ["top_k", "sampler_correction"]),
        (["rollout.min_p=0.1"], ["min_p", "sampler_correction"]),
        (["rollout.max_resample=2"], ["max_resample", "dynamic_sampling"]),
        (["rollout.min_new_tokens=9"], ["min_new_tokens", "max_completion_length"]),
        (["rollout.stop=['']"], ["rollout.stop"]),
        (["policy.lora.r=4", "policy.freeze=[vision]"], ["policy.freeze", "policy.lora"]),
        (["policy.lora.dropout=0.05"], ["policy.lora.dropout", "log-probs"]),
        (["policy.lora.target=[]"], ["policy.lora.target", "names no module"]),
        (["policy.freeze=[vision,projector,language]"], ["policy.freeze", "nothing is left"]),
        (["policy.min_pixels=9", "policy.max_pixels=4"], ["min_pixels", "max_pixels"]),
        (["optim.schedule=constant", "optim.warmup_steps=5"], ["warmup_steps", "schedule"]),
        (["optim.max_steps=5", "optim.warmup_steps=9"], ["warmup_steps", "max_steps"]),
        (["optim.betas=[0.9,1.0]"], ["optim.betas"]),
        (["data.eval=null", "evaluation.every=5"], ["evaluation.every", "data.eval"]),
        (["data.eval=null", "checkpoint.keep_best=true"], ["keep_best", "data.eval"]),
        (["data.eval=null", "data.eval_limit=5"], ["eval_limit", "data.eval"]),
        (["data.image_root=x"], ["image_root", "embedded"]),
        (["checkpoint.keep_best=true", "checkpoint.keep_last=0"], ["keep_best", "keep_last"]),
        (["checkpoint.sharded=true", "checkpoint.asynchronous=true"], ["exclude each other"]),
        (["checkpoint.sharded=true", "policy.lora={}"], ["checkpoint.sharded", "adapters"]),
        (["model_revision=main"], ["model_revision", "embedded"]),
        (["objective.epsilon=0.3"], ["epsilon", "num_iterations"]),
    ],
)
def test_a_combination_that_would_be_ignored_is_an_error(overrides, culprits):
    message = refusal(*overrides)

    for culprit in culprits:
        assert culprit in message


def test_a_truncating_sampler_is_allowed_where_its_ratio_is_corrected():
    overrides = ["rollout.top_p=0.9", "objective.sampler_correction=token"]

    assert load_settings("counting", overrides).rollout.top_p == 0.9


def test_values_that_a_recipe_leaves_open_are_all_asked_for():
    message = refusal(recipe="grounding_qwen2_5_vl_3b")

    assert "data.train has no value" in message
    assert "data.eval has no value" in message


def test_a_task_file_is_a_recipe_that_only_lacks_its_data():
    assert "data.train has no value" in refusal(recipe="my/parity.py")
    settings = load_settings("my/parity.py", ["data.train=a.jsonl"])
    assert (settings.task, settings.name) == ("my/parity.py", "parity")


def test_an_unknown_recipe_names_the_nearest_and_all():
    message = refusal(recipe="groundng")

    assert "did you mean grounding?" in message
    assert all(name in message for name in recipe_names())


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "a: 1\na: 2\n", "3\n", ""])
def test_a_file_that_is_no_recipe_is_named(text, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(text)

    assert str(path) in refusal(recipe=str(path))


def test_a_binary_recipe_is_named(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_bytes(b"\xff\xfe\x00")

    assert str(path) in refusal(recipe=str(path))


def test_an_override_without_a_key_is_named():
    assert "'quickly'" in refusal("quickly")
    assert "'=3'" in refusal("=3")


SWITCHES = {"resume", "trust_remote_code", "gradient_checkpointing", "dynamic_sampling"}
SWITCHES |= {
    "asynchronous",
    "cuda_graphs",
    "sharded",
    "keep_best",
    "normalize_each_reward",
    "mask_truncated_completions",
}


def described(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting that is no block of settings itself, by its dotted key."""
    for name, field in model.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        inner = [p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)]
        for block in inner:
            yield from described(block, f"{prefix}{name}.")
        if not inner or field.default is None:
            yield prefix + name, field


def test_every_setting_says_what_it_is_and_what_0_and_none_mean():
    for key, field in described(Settings):
        assert field.description, key
        # Off needs no word beside a switch, and a seed of 0 is as good as any.
        if field.default is None:
            assert "None" in field.description, key
        elif field.default == 0 and key.rpartition(".")[2] not in SWITCHES | {"seed"}:
            assert "0" in field.description, key


def test_known_keys_reach_into_optional_blocks():
    assert {"policy.lora.r", "objective.beta", "task"} <= set(known_keys(Settings))
