"""The settings of a run: refused combinations, documentation, and saved files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.recipes import load_settings, recipe_names
from vlm_grpo.config.run import EMBEDDED_TASKS, Settings, check_settings
from vlm_grpo.errors import UserError

DATA = ["data.train=train.jsonl", "data.eval=test.jsonl"]
"""The settings without values in the recipes for large models."""


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        load_settings("counting").seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_is_equal_after_saving_and_loading(recipe, tmp_path):
    needed = ["task_options.address=http://a", "task_options.judge_model=b"]
    overrides = {"judged": [*DATA, *needed], "mixed": [], "worlds": []}  # with own sources
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


def test_text_with_a_meaning_in_yaml_or_omegaconf_is_saved_literally(tmp_path):
    values = load_settings("counting").model_dump()
    values["rollout"]["stop"] = ("${x}", "null", "3", "a: b", "\n", "é", "???x")
    settings = Settings.model_validate(values)
    path = tmp_path / "config.yaml"

    settings.save(path)

    assert load_settings(str(path)) == settings


def list_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted key and the field of every setting that is not a block."""
    for name, field in model.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        inner = [p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)]
        for block in inner:
            yield from list_fields(block, f"{prefix}{name}.")
        if not inner or field.default is None:
            yield prefix + name, field


def test_every_setting_documents_itself_and_the_meaning_of_0_and_none():
    for key, field in list_fields(Settings):
        assert field.description, key
        # False needs no explanation for a switch, and a seed of 0 has no special meaning.
        if field.default is None:
            assert "None" in field.description, key
        elif field.default == 0 and field.default is not False and not key.endswith("seed"):
            assert "0" in field.description, key


def test_a_run_without_a_name_is_saved_with_its_folders_name(tmp_path):
    settings = Settings(task="counting", data=DataSettings(train="embedded:counting"))
    settings.save(tmp_path / "config.yaml")

    assert settings.name is None
    assert load_settings(tmp_path / "config.yaml").run_dir == settings.run_dir


def test_settings_of_another_type_are_refused():
    settings = load_settings("counting")
    assert check_settings(settings) is settings
    with pytest.raises(UserError, match=r"settings must be Settings: use load_settings\(…\)"):
        check_settings({})
