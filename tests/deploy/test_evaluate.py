"""Evaluation of a run in Python; tests/eval/test_evaluate.py tests the evaluation itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo import evaluate
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError


def test_a_run_is_evaluated_by_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings("counting")
    settings.save(tmp_path / "checkpoints" / "step-3" / "config.yaml")
    calls = []
    monkeypatch.setattr("vlm_grpo.eval.evaluate.evaluate", lambda *given: calls.append(given))
    evaluate(settings, tmp_path)
    assert calls[0][:3] == (settings, tmp_path / "checkpoints" / "step-3", None)


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has no complete checkpoint"):
        evaluate(load_settings("counting"), tmp_path)
