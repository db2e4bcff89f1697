"""Two processes give the gradients, the rewards and the held-out answers of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 4


def run(folder: Path, name: str, processes: int, *overrides: str) -> list[dict[str, Any]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"),
        *("--master_port=0", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"),
        *("-m", "vlm_grpo.cli", "train", "counting", f"name={name}", f"output_dir={folder}"),
        *(f"optim.max_steps={STEPS}", "optim.prompts_per_step=4", "evaluation.every=0"),
        *(
            "data.eval=null",
            "data.eval_limit=null",
            "checkpoint.every=2",
            "optim.warmup_steps=0",
            *overrides,
        ),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    # A rank that waits for another for ever would run into this limit.
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    # 70 held-out examples are two parts of an evaluation, of which each rank takes one.
    held_out = ("data.eval=embedded:counting", "data.eval_limit=70")
    one, two = run(tmp_path, "one", 1, *held_out), run(tmp_path, "two", 2, *held_out)
    assert len(one) == len(two) == STEPS
    for a, b in zip(one, two, strict=True):
        # The normalisers and the spread are those of all ranks; rounding differs by their cut.
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["frac_reward_zero_std"] == a["frac_reward_zero_std"]
        assert b["reward_std"] == pytest.approx(a["reward_std"], abs=1e-6)
    before = [tmp_path / name / "evaluation" / "step-000000.jsonl" for name in ("one", "two")]
    rows = [path.read_text() for path in before]
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 70
    assert two[-1]["eval/exact"] == pytest.approx(one[-1]["eval/exact"], abs=0.03)  # two of 70


@pytest.mark.slow
def test_ranks_without_a_useful_group_do_not_hang(tmp_path: Path) -> None:
    # With one prompt a rank, a step in which one rank's group has no spread is sure to come.
    rows = run(tmp_path, "thin", 2, "optim.prompts_per_step=2", "optim.max_steps=8")
    assert any(0 < row["frac_reward_zero_std"] < 1 for row in rows)
    assert len(rows) == 8


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_with_other_ranks() -> None:
    # 130 examples are three parts: one is on disk at the kill, two are left for the two ranks.
    script = Path(__file__).parents[1] / "benchmarks" / "resumed_evaluation.py"
    line = [sys.executable, str(script), "--count", "130", "--tasks", "counting"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed on 2 ranks: the same to the byte" in done.stdout
