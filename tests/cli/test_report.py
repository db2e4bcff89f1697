"""``vlm-grpo report``: runs by path and by name. tests/report covers the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import fails

from vlm_grpo.cli.report import find_run_dir
from vlm_grpo.errors import UserError


@pytest.fixture(autouse=True)
def _one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/counting").mkdir(parents=True)


def test_a_run_is_found_by_name_and_by_path() -> None:
    assert find_run_dir("counting") == Path("runs/counting")
    assert find_run_dir("runs/counting") == Path("runs/counting")
    with pytest.raises(UserError, match="did you mean counting"):
        find_run_dir("countin")


def test_a_sweep_takes_several_runs_and_two_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs several runs" in fails(capsys, "report", "--sweep", "optim.lr", "counting")
    three = [word for key in ("optim.lr", "seed", "name") for word in ("--sweep", key)]
    assert "at most two settings" in fails(capsys, "report", *three, "counting", "counting")


@pytest.mark.parametrize("runs", [["countin"], ["counting", "countin"]])
def test_a_missing_run_is_one_message(capsys: pytest.CaptureFixture[str], runs: list[str]) -> None:
    assert "runs/ has counting" in fails(capsys, "report", *runs)
