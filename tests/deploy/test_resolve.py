"""Names of models: missing ones, and the best checkpoint by a truncated metrics file."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo.deploy.resolve import NO_TASK, read_held_out_values, resolve_model
from vlm_grpo.errors import UserError

ROWS = '{"step": 0, "eval/exact": 0.25}\n{"step": 1, "eval/exact": NaN}\n{"step": 2}\n'


def test_a_truncated_last_line_does_not_hide_the_evaluations_before_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(ROWS + '{"step": 3, "eval/exa')
    assert read_held_out_values(tmp_path, "exact") == {1: 0.25}


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("oops\n" + ROWS)
    with pytest.raises(UserError, match=r"metrics\.jsonl:1 is not a JSON object"):
        read_held_out_values(tmp_path, "exact")


def test_a_hub_name_has_default_settings_and_no_checkpoint() -> None:
    resolved = resolve_model("a/model", ["seed=3"])
    assert (resolved.checkpoint, resolved.run) == (None, None)
    assert (resolved.settings.model, resolved.settings.task) == ("a/model", NO_TASK)
    assert resolved.settings.seed == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "model ./nowhere: there is no such folder"),
        ("embeded", r"there is no model or run 'embeded' \(did you mean embedded\?\)"),
        ("empty", "has no model, no adapter and no checkpoints"),
        ("stopped", "has no complete checkpoint"),
    ],
)
def test_a_name_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("runs/stopped/checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=message):
        resolve_model(model)
