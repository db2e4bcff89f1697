"""Traces of single steps, and where a run writes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from small_runs import make_embedded_trainer

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.tracking.profiling import profile_step
from vlm_grpo.utils.timing import Stopwatch


def test_only_the_chosen_step_has_a_trace_with_its_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_embedded_trainer(tmp_path, "logging.profile_steps=[1]", "optim.max_steps=2")
    for _ in range(2):
        trainer.step()
    trainer.sampler.close()
    (path,) = (trainer.settings.run_dir / "profile").iterdir()
    assert path.name == "step-1.json.gz"
    assert f"profile    {path}: open it at https://ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"step", "rollout", "prefill", "decode", "reward", "update"} <= names
    assert "aten::index_select" in names


def test_a_step_that_fails_has_no_trace(tmp_path: Path) -> None:
    stopwatch = Stopwatch()
    with (
        pytest.raises(ValueError, match="expected"),
        profile_step(tmp_path / "profile" / "step-0", stopwatch, torch.device("cpu")),
    ):
        raise ValueError("expected")
    assert not list((tmp_path / "profile").iterdir())
    assert stopwatch.annotate is Stopwatch().annotate


def test_a_step_that_is_never_run_is_an_error() -> None:
    overrides = ["optim.max_steps=3", "logging.profile_steps=[1,3]"]
    with pytest.raises(UserError, match=r"profile_steps=\[1, 3\] .* numbered from 0 to 2"):
        load_settings("quickstart", overrides)
