"""The settings of supervised steps: their number, their place in a run, and wrong combinations."""

from __future__ import annotations

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError


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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["warm_start.steps=0"], "warm_start.steps must be at least 1"),
        (["warm_start.lr=1e-4"], "warm_start.steps has no value"),
        (["warm_start.steps=all", "data.curriculum={}"], "supervised.*set data.curriculum=null"),
        (["warm_start.steps=all", "objective.replay={}"], "supervised.*set objective.replay=null"),
        (["warm_start.steps=some"], "should be a whole number or be 'all'"),
        (["warm_start.steps=400"], "leaves no step after it of optim.max_steps=400.*vlm-grpo sft"),
        (["warm_start.steps=390"], "optim.warmup_steps=20 exceeds the 10 steps"),
        (["warm_start.steps=5", "warm_start.warmup_steps=6"], "exceeds the 5 supervised steps"),
        (
            ["warm_start.steps=5", "warm_start.warmup_steps=1", "warm_start.schedule=constant"],
            "warm_start.warmup_steps has no effect with warm_start.schedule=constant",
        ),
    ],
)
def test_wrong_combinations_are_named(overrides: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load_settings("quickstart", overrides)
