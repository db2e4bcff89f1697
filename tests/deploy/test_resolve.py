"""The best checkpoint of a run is found in a metrics file that a crash has truncated."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo.deploy.resolve import held_out_values
from vlm_grpo.errors import UserError

ROWS = '{"step": 0, "eval/exact": 0.25}\n{"step": 1, "eval/exact": NaN}\n{"step": 2}\n'


def test_a_truncated_last_line_does_not_hide_the_evaluations_before_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(ROWS + '{"step": 3, "eval/exa')
    assert held_out_values(tmp_path, "exact") == {1: 0.25}


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("oops\n" + ROWS)
    with pytest.raises(UserError, match=r"metrics\.jsonl:1 is not a JSON object"):
        held_out_values(tmp_path, "exact")
