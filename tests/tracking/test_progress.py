"""What a run shows: live in a terminal, plain in a pipe, what it will do and what it came to."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.config.run import load_settings
from vlm_grpo.data import load_examples
from vlm_grpo.evaluation.evaluate import Evaluation
from vlm_grpo.model.policy import load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.tracking.summary import TrainResult, change_line, describe_run

COMMAND = [
    sys.executable, "-m", "vlm_grpo.cli", "train", "quickstart", "optim.max_steps=3",
    "optim.warmup_steps=0", "optim.prompts_per_step=2", "rollout.num_generations=2",
    "data.train_limit=8", "data.eval_limit=8", "evaluation.every=1", "name=shown",
    "logging.trackers=[]",
]  # fmt: skip


def in_terminal(command: list[str], folder: Path) -> str:
    """What the command writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # Linux reports the end of a terminal as an error
            pass
    os.close(ours)
    assert process.returncode == 0
    return b"".join(parts).decode()


def test_a_terminal_shows_the_run_live(tmp_path: Path) -> None:
    shown = in_terminal(COMMAND, tmp_path)
    assert "\x1b[" in shown  # lines are drawn over
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "3/3" in text
    assert re.search(
        r"reward \d\.\d+  held-out exact \d\.\d+  length \d\.\d  [\d.e+]+ samples/s  \d\.\d GiB",
        text,
    )
    assert re.search(r"\b(evaluation|saving|update|decode|rollout) +reward", text)


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    done = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert re.match(r"step 3/3  reward .* held-out exact .* samples/s .* GiB  0 s left$", line)
    starts = ["model", "task", "data", "images", "rewards", "step", "reference", "note"]
    starts += ["run folder", "before", "after", "change", "best", "report", "samples"]
    starts += ["checkpoint", "next", ""]
    lines = done.stdout.splitlines()
    assert [text[:11].strip() for text in lines] == starts
    # What it says to do next is what can be done.
    for text in lines[-2:]:
        assert " vlm-grpo " in text
    assert (tmp_path / "runs/shown/report.html").is_file()


def lines_of(*overrides: str) -> dict[str, str]:
    settings = load_settings("quickstart", overrides)
    task = load_task("counting")
    examples = load_examples("embedded:counting", task, settings.data, "train")
    lines = describe_run(settings, load_policy(settings), task, examples, examples[:3])
    return {line[:11].strip(): line[11:] for line in lines}


def test_the_first_lines_say_what_will_happen() -> None:
    lines = lines_of("data.train_limit=9")
    assert re.match(r"embedded \([\d,]+ weights, [\d,]+ trained, full weights\)", lines["model"])
    assert lines["data"] == "embedded:counting: 9 examples; 3 held out"
    # 84 x 84 pixels are 3 x 3 tokens of 28 x 28.
    assert lines["images"].startswith("9 tokens an example, prompts up to ")
    assert lines["reference"] == "none: beta=0, the loss has no KL"
    assert "a policy loss near 0 is normal" in lines["note"]


@pytest.mark.parametrize(
    ("every", "said"),
    [
        ("1", "the policy at the start of each step (k=1): no second model, and a KL of about 0"),
        ("5", "the policy, taken anew every 5 steps"),
        ("never", "the policy before its first step, for the whole run"),
    ],
)
def test_the_reference_is_told(every: str, said: str) -> None:
    lines = lines_of(
        "data.train_limit=2", "objective.beta=0.1", f"objective.reference_refresh_every={every}"
    )
    assert lines["reference"] == said


def evaluation(*values: float | None, mean: float = 0.5, lower_is_better: bool = False) -> Any:
    rows = tuple(
        {"id": str(n), "rewards": {"exact": value}, "metrics": {}} for n, value in enumerate(values)
    )
    return Evaluation("exact", len(rows), {"exact": mean}, (0.4, 0.6), rows, lower_is_better)


def test_the_change_is_paired_by_example() -> None:
    same = evaluation(0, 1, 0, 1)
    assert change_line(same, evaluation(1, 1, 1, 1)).startswith("+50.0 points [")
    assert change_line(same, same) == "+0.0 points [+0.0, +0.0], which may be chance"
    # Unpaired, 20 times 0 or 1 at random could not tell a change of one tenth; all of it in the
    # same direction can.
    first = [0.0, 0.5] * 10
    better = change_line(evaluation(*first), evaluation(*(value + 0.1 for value in first)))
    assert better == "+10.0 points [+10.0, +10.0]"
    undefined = evaluation(None, mean=math.nan)
    assert change_line(undefined, evaluation(1)) == "no example was scored both times"


def test_an_error_changes_in_its_own_unit_and_a_metric_of_the_set_as_a_whole() -> None:
    before, after = evaluation(3, 2, lower_is_better=True), evaluation(1, 0, lower_is_better=True)
    assert change_line(before, after) == "-2.000 [-2.000, -2.000]"
    assert str(after) == "exact 0.500 [0.400, 0.600] (n = 2)"
    whole, later = evaluation(None, mean=0.25), evaluation(None, mean=0.5)
    assert change_line(whole, later) == "+25.0 points"
    # A mean over groups: each example has a value, but their mean is another number.
    grouped = [replace(evaluation(0, 1, 1), interval=(math.nan, math.nan)) for _ in range(2)]
    grouped[1] = replace(grouped[1], metrics={"exact": 0.9})
    assert change_line(*grouped) == f"{100 * (0.9 - grouped[0].value):+.1f} points"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (0, "90.0%, the model as it was loaded"),
        (4, "90.0%, CHECKPOINTS/step-4"),
        (2, "90.0%, after step 2, not kept (checkpoint.keep_best=true keeps it)"),
    ],
)
def test_the_best_is_told_with_where_it_is(step: int, said: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-4"
    checkpoint.mkdir()
    result = TrainResult(None, None, (0.9, step), checkpoint, tmp_path)
    best = str(result).splitlines()[0]
    assert best == "best       " + said.replace("CHECKPOINTS", str(tmp_path))
    error = replace(result, lower_is_better=True)
    assert str(error).splitlines()[0] == best.replace("90.0%", "0.900")
