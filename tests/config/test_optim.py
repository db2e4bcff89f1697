"""The settings of the optimizer: the length of a run, its warmup, and the end of its schedule."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError


@pytest.mark.parametrize(
    ("epochs", "examples", "steps"), [(3, 10, 8), (2, 10, 5), (0.01, 10, 1), (1, 4, 1)]
)
def test_epochs_are_counted_in_prompts(epochs: float, examples: int, steps: int) -> None:
    sizes = ["optim.prompts_per_step=4", "optim.warmup_steps=0"]
    overrides = [f"optim.num_train_epochs={epochs}", *sizes]
    settings = load_settings("quickstart", overrides).with_steps(examples)
    assert (settings.optim.max_steps, settings.optim.num_train_epochs) == (steps, None)
    assert settings.optim.prompts_per_step == 4
    assert settings.with_steps(99) is settings
    assert load_settings("quickstart", optim=settings.optim).optim == settings.optim


def test_steps_or_epochs_of_the_user_replace_those_of_the_recipe(tmp_path: Any) -> None:
    assert load_settings("quickstart", ["optim.num_train_epochs=2"]).optim.num_train_epochs == 2
    recipe = tmp_path / "epochs.yaml"
    recipe.write_text("task: counting\noptim: {num_train_epochs: 2}\ndata: {train: a}\n")
    assert load_settings(recipe).optim.num_train_epochs == 2
    assert load_settings(recipe, ["optim.max_steps=7"]).optim.num_train_epochs is None
    assert load_settings(recipe, ["optim.max_steps=null"]).optim.num_train_epochs is None
    both = {"num_train_epochs": 2, "max_steps": 7}
    with pytest.raises(UserError, match="exclude each other: set one of them to null"):
        load_settings("quickstart", optim=both)


def test_the_first_steps_of_a_run_are_supervised() -> None:
    settings = load_settings("quickstart", ["warm_start.steps=3", "optim.max_steps=23"])
    assert [settings.is_supervised(step) for step in range(5)] == [True] * 3 + [False] * 2
    assert settings.supervised_steps == 3
    assert settings.name == "quickstart"


def test_without_a_warm_start_no_step_is_supervised() -> None:
    settings = load_settings("quickstart")
    assert settings.warm_start is None
    assert settings.supervised_steps == 0
    assert not settings.is_supervised(0)


def test_all_steps_of_a_run_can_be_supervised() -> None:
    settings = load_settings("quickstart", ["warm_start.steps=all", "optim.max_steps=20"])
    assert settings.supervised_steps == 20
    assert settings.is_supervised(20)  # a caller of Trainer.step may go on after the last one
    assert settings.name == "quickstart-sft"  # not the folder of train
    assert load_settings("quickstart", ["warm_start.steps=all", "name=mine"]).name == "mine"
