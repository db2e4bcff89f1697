"""The settings of a run and its blocks: what they mean, documentation, and saved files."""

import pytest
from pydantic import ValidationError

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.listing import list_settings
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.recipes import load_settings, recipe_names
from vlm_grpo.config.run import EMBEDDED_TASKS, Settings
from vlm_grpo.errors import UserError

DATA = ["data.train=train.jsonl", "data.eval=test.jsonl"]
"""The settings without values in the recipes for large models."""


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_equal_after_saving_and_loading(recipe, tmp_path):
    needed = ["task_options.address=http://a", "task_options.judge_model=b"]
    overrides = {name: [] for name in ("mixed", "worlds", "vero_qwen3_vl_4b")}  # own sources
    overrides |= {name: [*DATA, *needed] for name in ("judged", "search_qwen2_5_vl_7b")}
    settings = load_settings(recipe, overrides.get(recipe, DATA))
    path = tmp_path / "run" / "config.yaml"
    settings.save(path)
    assert load_settings(str(path)) == settings
    assert settings.name == recipe


def test_a_task_that_the_embedded_model_has_not_learned_must_name_a_model():
    data = {"train": "rows.jsonl"}
    for task in ("detection", "my/clock.py"):
        with pytest.raises(ValidationError, match=r"model has no value.*learned only counting, gr"):
            Settings.model_validate({"task": task, "data": data})
        given = Settings.model_validate({"task": task, "data": data, "model": "embedded"})
        assert given.exceeds_embedded_model
    with pytest.raises(UserError, match="model has no value: add model="):
        load_settings("my/clock.py", ["data.train=rows.jsonl"])
    for task in EMBEDDED_TASKS:
        settings = Settings.model_validate({"task": task, "data": data})
        assert (settings.model, settings.exceeds_embedded_model) == ("embedded", False)


def test_text_with_a_meaning_in_yaml_or_omegaconf_and_no_name_are_saved_as_they_are(tmp_path):
    values = load_settings("counting").model_dump()
    values["rollout"]["stop"] = ("${x}", "null", "3", "a: b", "\n", "é", "???x")
    settings, path = Settings.model_validate(values), tmp_path / "config.yaml"
    settings.save(path)
    assert load_settings(str(path)) == settings
    settings = Settings(task="counting", data=DataSettings(train="embedded:counting"))
    settings.save(path)
    assert settings.name is None
    assert load_settings(path).run_dir == settings.run_dir


def test_every_setting_documents_the_meaning_of_0_and_none():
    for setting in list_settings():
        if setting.default == "None":
            assert "None" in setting.description, setting.key
        # A seed of 0 has no special meaning.
        elif setting.default in ("0", "0.0") and not setting.key.endswith("seed"):
            assert "0" in setting.description, setting.key


def test_the_settings_say_what_a_step_needs_and_are_frozen():
    for fields, needs_reference, can_skip in (
        ({}, False, True),
        ({"beta": 0.1, "reference_refresh_every": "never"}, True, False),
        ({"beta": 0.1}, False, False),  # the old log-probs are the reference's
        ({"entropy_coef": 0.01}, False, False),
    ):
        own = ObjectiveSettings(**fields)
        assert (own.needs_reference, own.can_skip_zero_advantages) == (needs_reference, can_skip)
    with pytest.raises(ValidationError):
        own.beta = 0.2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("epochs", "examples", "steps"), [(3, 10, 8), (2, 10, 5), (0.01, 10, 1), (1, 4, 1)]
)
def test_epochs_are_counted_in_prompts(epochs, examples, steps):
    sizes = ["optim.prompts_per_step=4", "optim.warmup_steps=0"]
    overrides = [f"optim.num_train_epochs={epochs}", *sizes]
    settings = load_settings("quickstart", overrides).with_steps(examples)
    assert (settings.optim.max_steps, settings.optim.num_train_epochs) == (steps, None)
    assert settings.optim.prompts_per_step == 4
    assert settings.with_steps(99) is settings
    assert load_settings("quickstart", optim=settings.optim).optim == settings.optim


def test_steps_or_epochs_of_the_user_replace_those_of_the_recipe(tmp_path):
    assert load_settings("quickstart", ["optim.num_train_epochs=2"]).optim.num_train_epochs == 2
    recipe = tmp_path / "epochs.yaml"
    recipe.write_text("task: counting\noptim: {num_train_epochs: 2}\ndata: {train: a}\n")
    assert load_settings(recipe).optim.num_train_epochs == 2
    assert load_settings(recipe, ["optim.max_steps=7"]).optim.num_train_epochs is None
    assert load_settings(recipe, ["optim.max_steps=null"]).optim.num_train_epochs is None
    both = {"num_train_epochs": 2, "max_steps": 7}
    with pytest.raises(UserError, match="exclude each other: set one of them to null"):
        load_settings("quickstart", optim=both)


@pytest.mark.parametrize(
    ("overrides", "count", "name"),
    [
        ([], 0, "quickstart"),
        (["warm_start.steps=3"], 3, "quickstart"),
        (["warm_start.steps=all"], 23, "quickstart-sft"),  # not the folder of train
        (["warm_start.steps=all", "name=mine"], 23, "mine"),
    ],
)
def test_the_first_or_all_steps_of_a_run_are_supervised(overrides, count, name):
    settings = load_settings("quickstart", ["optim.max_steps=23", *overrides])
    assert (settings.supervised_steps, settings.name) == (count, name)
    # A caller of Trainer.step may go on after the last one.
    expected = [count > 0, count > 0, count > 3, count == 23]
    assert [settings.is_supervised(step) for step in (0, 2, 3, 23)] == expected
