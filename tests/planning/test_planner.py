"""Tests of the plan: the largest settings that fit, and changes that make a recipe fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import fails, run

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.loading import get_model_source
from vlm_grpo.planning import Planner
from vlm_grpo.planning.devices import Device, find_device
from vlm_grpo.planning.planner import with_changes


def test_the_largest_group_fits_and_one_more_does_not(planner: Planner) -> None:
    group = planner.find_largest_group()
    assert 8 < group < 1024
    assert planner.fits(with_changes(planner.settings, "rollout", num_generations=group))
    assert not planner.fits(with_changes(planner.settings, "rollout", num_generations=group + 1))


def test_changes_are_valid_and_make_the_recipe_fit(planner: Planner) -> None:
    values = ["rollout.num_generations=64", "rollout.max_completion_length=64"]
    overrides = ["data.train_limit=30", "objective.beta=0.1", *values]
    overrides += ["objective.reference_refresh_every=never"]
    tight = Planner(load_settings("counting", overrides), Device("small", 210 << 20, is_cpu=True))
    assert not tight.fits(tight.settings)
    peaks = []
    for text, step in tight.suggest_changes():
        overrides += text.split()
        assert load_settings("counting", overrides) == step.settings
        peaks.append(step.memory.peak)
    assert peaks[-1] <= tight.device.usable < peaks[0]
    lines = str(tight.plan()).splitlines()
    assert any(line.startswith("fits       no: ") for line in lines)


def test_no_change_makes_a_tiny_device_fit(planner: Planner) -> None:
    tiny = Planner(planner.settings, Device("tiny", 1 << 20, is_cpu=True))
    assert "not even then" in str(tiny.plan()).splitlines()[-1]
    assert tiny.find_largest_group() == 0


def test_the_repeated_form_is_an_error() -> None:
    settings = load_settings("counting", ["policy.engine=repeated", "data.train_limit=5"])
    with pytest.raises(
        UserError, match=r"covers only the shared-prefix form: policy\.engine=repeated"
    ):
        Planner(settings, find_device("24GB"))


def test_the_plan_needs_no_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    source = Path(get_model_source("embedded"))
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    status, out, _ = run(
        capsys, "plan", "counting", f"model={folder}", "data.train_limit=20", "--gpu", "24GB"
    )
    assert status == 0
    assert "1,210,304 weights" in out  # of the embedded model
    assert "prompt     34 / 34 / 34 tokens" in out
    assert "fits       yes" in out
    assert "time" not in out.split()  # the rates of a GPU given by its memory are unknown


def test_an_unknown_gpu_or_model_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not in the table" in fails(capsys, "plan", "counting", "--gpu", "X9")
    missing = fails(capsys, "plan", "counting", "model=./nowhere", "data.train_limit=2")
    assert "model ./nowhere cannot be loaded" in missing
