"""The settings of the optimizer: the length of a run, its warmup, and the end of its schedule."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_grpo.config.optim import OptimSettings
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


@pytest.mark.parametrize(
    ("optim", "problem"),
    [
        ({"warmup_steps": 9}, "warmup_steps=9 exceeds optim.max_steps=8"),
        ({"warmup_steps": 0.5}, None),
    ],
)
def test_a_warmup_longer_than_the_epochs_is_refused(
    optim: dict[str, Any], problem: str | None
) -> None:
    settings = OptimSettings(**{"num_train_epochs": 3, "prompts_per_step": 4, **optim})
    if problem is None:
        assert settings.with_steps(10).max_steps == 8
        return
    with pytest.raises(UserError, match=problem):
        settings.with_steps(10)


@pytest.mark.parametrize(
    "values",
    [
        {"min_lr": 1e-7},
        {"schedule": "cosine_with_min_lr"},
        {"schedule": "cosine_with_min_lr", "lr": 1e-6, "min_lr": 2e-6},
    ],
)
def test_a_minimum_rate_belongs_to_one_schedule(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="needs a min_lr above 0 and at most lr"):
        OptimSettings(**values)
