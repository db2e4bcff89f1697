"""Recipes: values, overrides from texts and Python, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.config.recipes import load_settings, recipe_names
from vlm_grpo.errors import UserError

SETTINGS = load_settings("counting")
NO_RECIPE = "recipe must be the name or the path of a recipe, not "
FIVE = "optim.max_steps=5"
NO_LIST = r'overrides must be a list: \["optim.lr=1e-5"\]'


def get_error(*overrides: str, recipe: str = "counting") -> str:
    with pytest.raises(UserError) as caught:
        load_settings(recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [([], "counting"), (["task=my_tasks/parity.py"], "parity"), (["name=mine"], "mine")],
)
def test_run_name_defaults_to_the_recipe_or_an_overridden_task(overrides, name):
    assert load_settings("counting", overrides).run_dir.name == name


def test_saved_settings_of_an_earlier_version_are_read(tmp_path):
    recipe = tmp_path / "config.yaml"
    checkpoint = "checkpoint: {asynchronous: false, every: 3}"
    recipe.write_text(f"{{task: counting, data: {{train: d.jsonl}}, {checkpoint}}}")
    assert load_settings(recipe).checkpoint.every == 3


def test_all_missing_values_of_a_recipe_are_named_also_of_a_task_file_without_data():
    message = get_error(recipe="grounding_qwen2_5_vl_3b")
    assert "data.train has no value" in message
    assert "data.eval has no value" in message
    assert "data.train has no value" in get_error(recipe="my/parity.py")
    settings = load_settings("my/parity.py", ["data.train=a.jsonl", "model=a/b"])
    assert (settings.task, settings.name) == ("my/parity.py", "parity")


def test_python_values_override_texts_of_which_the_last_counts_and_the_recipe():
    texts = ["optim.lr=1e-6", "policy.lora.r=8", *(f"optim.weight_decay={n}" for n in (0.1, 0.5))]
    policy = PolicySettings(lora=LoraSettings(r=4))
    values = {"optim": {"lr": 3e-6, "betas": [0.9, 0.95]}, "output_dir": Path("elsewhere")}
    settings = load_settings("counting", texts, policy=policy, **values)
    optim = settings.optim
    assert (optim.lr, optim.weight_decay, optim.betas) == (3e-6, 0.5, (0.9, 0.95))
    assert settings.policy.lora == LoraSettings(r=4)
    assert settings.run_dir == Path("elsewhere/counting")
    assert settings.rollout.max_completion_length == 4  # from the recipe
    assert settings.rollout.top_p == 1.0  # the default


def test_overrides_may_be_a_mapping_with_dotted_keys_and_numpys_numbers():
    overrides = {"optim.lr": 3e-6, "policy.lora": {}, "rollout": {"stop": ["${x}"]}}
    settings = load_settings("counting", overrides)
    assert settings.optim.lr == 3e-6
    assert settings.policy.lora == LoraSettings()
    assert settings.rollout.stop == ("${x}",)  # Python text is literal
    settings = load_settings("counting", seed=np.int64(3), optim={"lr": np.float32(0.5)})
    assert (settings.seed, settings.optim.lr) == (3, 0.5)


@pytest.mark.parametrize(
    "values",
    [{"data": DataSettings(train="a.jsonl")}, {"data.train": "a.jsonl"}, {"data": {"train": "a"}}],
)
def test_a_block_without_a_value_is_completed_from_python(tmp_path, values):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: counting\ndata: ???\n")
    assert str(load_settings(recipe, values).data.train).startswith("a")
    with pytest.raises(UserError, match="data has no value"):
        load_settings(recipe)


@pytest.mark.parametrize(
    ("overrides", "optim", "warmup", "note"),
    [
        ({}, {"max_steps": 5}, 5, FIVE),
        ({"optim.max_steps": 5}, {}, 5, FIVE),
        (
            {"warm_start.steps": 2},
            {"max_steps": 5},
            3,
            f"the 3 steps of {FIVE} after those of warm_start",
        ),
        ({"optim.max_steps": 30}, {}, 20, ""),
        ({}, {}, 20, ""),
    ],
)
def test_a_recipe_s_warmup_is_shortened_to_the_given_steps(overrides, optim, warmup, note, caplog):
    settings: Any = load_settings("counting", overrides, optim=optim)
    assert settings.optim.warmup_steps == warmup
    text = f"optim.warmup_steps=20 of the recipe is shortened to {note}"
    assert (text in caplog.text) == bool(note)
    settings = load_settings("choice", ["warm_start.steps=all", "optim.max_steps=3"])
    assert settings.warm_start.warmup_steps == 3
    assert "warm_start.warmup_steps=10 of the recipe is shortened to optim.max" in caplog.text


def test_a_warning_comes_from_the_first_process_alone_and_not_before_an_error(monkeypatch, caplog):
    assert "unknown key optim.rl" in get_error("optim.max_steps=5", "optim.rl=1")
    assert not caplog.records
    monkeypatch.setenv("RANK", "1")
    assert load_settings("counting", ["optim.max_steps=5"]).optim.warmup_steps == 5
    assert not caplog.records


def test_an_optimizer_without_betas_is_given_none_by_the_recipe():
    optim = load_settings("counting", ["optim.name=adafactor"]).optim
    assert "betas" not in optim.model_fields_set
    assert load_settings("counting", ["optim.name=adamw_8bit"]).optim.betas == (0.9, 0.99)
    both = ["optim.name=adafactor", "optim.betas=[0.9,0.99]"]
    assert "optim.betas has no effect with optim.name=adafactor" in get_error(*both)


def test_a_warmup_that_the_user_gives_is_not_shortened(tmp_path):
    problem = "optim.warmup_steps=20 exceeds optim.max_steps=5: lower it too"
    assert problem in get_error("optim.max_steps=5", "optim.warmup_steps=20")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: counting\noptim: {max_steps: 5, warmup_steps: 20}\ndata: {train: a}\n")
    assert problem in get_error(recipe=str(recipe))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        *((f"{n}.yaml", text, "recipe {} ") for n, text in enumerate(("- a\n- b\n", "a: [1\n"))),
        *((f"{n}.yaml", text, "recipe {} ") for n, text in enumerate(("a: 1\na: 2\n", "3\n", ""))),
        ("date.yaml", "a: 2026-13-45", "recipe {} cannot be read"),
        ("digits.yaml", f"a: {'9' * 5000}", "recipe {} cannot be read"),
        ("deep.yaml", f"a: {'[' * 1000}{']' * 1000}", "recipe {} cannot be read"),
        ("image.png", b"\x89PNG", "recipe {} cannot be read: it is not a text file: name a reci"),
        ("a.jsonl", '{"id": 1}', "{0} holds data: name a recipe, and set data.train={0}"),
        ("run/config.yaml", "", "is the folder of a run: its recipe is {}"),
    ],
)
def test_a_file_that_is_no_recipe_is_named_or_the_nearest_recipe(name, content, problem, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    recipe = path.parent if name.startswith("run/") else path
    assert problem.format(path) in get_error(recipe=str(recipe))
    message = get_error(recipe="groundng")
    assert all(text in message for text in ("did you mean grounding?", *recipe_names()))


@pytest.mark.parametrize(
    ("recipe", "overrides", "problem"),
    [
        *((wrong, (), NO_RECIPE) for wrong in (None, {"task": "counting"}, SETTINGS)),
        *(("counting", wrong, NO_LIST) for wrong in ("optim.lr=1e-5", 3, None, [3], SETTINGS)),
        ("counting", {"optim": {3: 1}}, "key 3 of the settings must be text, not int"),
        ("counting", {"seed": "4"}, "recipe counting has wrong settings"),
        ("counting", {"seed": True}, "recipe counting has wrong settings"),
        ("counting", {"zebra": 1}, "recipe counting has wrong settings"),
        ("counting", {"model": object()}, "^model must be text, not object$"),
        ("counting", {"output_dir": object()}, "^output_dir must be text, not object$"),
        ("counting", {"rollout": {"stop": ["a", object()]}}, r"rollout\.stop must be text, "),
    ],
)
def test_python_values_of_a_wrong_type_are_refused(recipe, overrides, problem):
    with pytest.raises(UserError, match=problem):
        load_settings(recipe, overrides)
