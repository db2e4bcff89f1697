"""The first and last lines of a run."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.eval.scored import Row, Scored
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.summary import TrainResult, describe_run, format_change
from vlm_grpo.training.trainer import train


def split(lines: Iterable[str]) -> dict[str, str]:
    return {line[:11].strip(): line[11:] for line in lines}


def describe(*overrides: str) -> dict[str, str]:
    settings = load_settings("quickstart", ["data.train_limit=9", *overrides])
    task = load_task("counting")
    examples = load_examples("embedded:counting", task, settings.data, "train")
    return split(describe_run(settings, load_policy(settings), task, examples, examples[:3]))


def test_the_first_lines_describe_the_run_and_note_what_the_embedded_model_has_not_learned():
    lines = describe()
    assert re.match(r"embedded \([\d,]+ weights, [\d,]+ trained, full weights\)", lines["model"])
    assert lines["data"] == "embedded:counting: 9 examples; 3 held out"
    # 84 x 84 pixels are 3 x 3 tokens of 28 x 28.
    assert lines["images"].startswith("9 tokens per example, prompts up to ")
    assert lines["reference"] == "none: beta=0, the loss has no KL"
    assert lines["attention"] == "PyTorch's flash kernels for CPUs; decode steps run eagerly"
    assert lines["step"].startswith("32 prompts × 8 completions, one prompt pass per group")
    assert "a policy loss near 0 is normal" in lines["note"]
    parts = describe("optim.mini_batches=4")
    assert "completions in 4 mini-batches, one prompt" in parts["step"]
    assert "note" not in parts
    note = "the embedded model has learned only to count, locate and read"
    assert note in describe("task=detection")["note"]
    assert note not in lines["note"]
    for every, text in (
        (1, "the policy at the start of each step (k=1): no second model, and a KL of about 0"),
        (5, "a copy of the policy, refreshed every 5 steps"),
        ("never", "the policy before its first rollout, for the entire run"),
    ):
        lines = describe("objective.beta=0.1", f"objective.reference_refresh_every={every}")
        assert lines["reference"] == text


def test_the_optimizer_and_the_loss_are_described_as_far_as_a_run_has_them():
    objective = "objective.loss=own.py:mine", "objective.loss_type=dapo"
    own = "objective.advantage_estimator=own.py:other"
    lines = describe("optim.lr=1e-5", "optim.lr_vision=2e-6", *objective, own)
    assert lines["optimizer"] == "adamw, lr 1e-05, 2e-06 of the vision, cosine"
    assert lines["loss"] == "own.py:mine, reduced as dapo, advantages own.py:other"
    assert "sum to 0" not in lines["note"]
    lines = describe("warm_start.steps=all", "warm_start.lr=1e-4")
    assert lines["step"].startswith("32 prompts with their targets, one prompt pass")
    assert lines["optimizer"] == "adamw, lr 0.0001, linear"
    assert not {"loss", "reference", "note"} & lines.keys()


def evaluation(
    *values: float | None, mean: float | None = None, lower_is_better: bool = False
) -> Scored:
    """Return a table of values, whose mean is theirs unless it is given."""
    rows = tuple(
        Row(id=str(n), output="", answer=None, reward=1.0, rewards={"exact": value}, metrics={})
        for n, value in enumerate(values)
    )
    known = [value for value in values if value is not None]
    if mean is None:
        mean = sum(known) / len(known)
    return Scored(rows, "exact", {"exact": mean}, lower_is_better)


def test_the_change_is_paired_by_example():
    same = evaluation(0, 1, 0, 1)
    assert format_change(same, evaluation(1, 1, 1, 1)).startswith("+50.0 points [")
    assert format_change(same, same) == "+0.0 points [+0.0, +0.0], which may be chance"
    # Unpaired, a tenth of a point would be lost in 20 random values; paired, all of them rise.
    first = [0.0, 0.5] * 10
    better = format_change(evaluation(*first), evaluation(*(value + 0.1 for value in first)))
    assert better == "+10.0 points [+10.0, +10.0]"
    undefined = evaluation(None, mean=math.nan)
    assert format_change(undefined, evaluation(1)) == "no example was scored both times"
    # That of an error has no percent, and that of a set no interval.
    before, after = evaluation(3, 2, lower_is_better=True), evaluation(1, 0, lower_is_better=True)
    assert format_change(before, after) == "-2.000 [-2.000, -2.000]"
    assert str(after) == "exact 0.500 [0.000, 1.000] (n = 2)"
    assert str(evaluation(None, mean=math.nan)) == "exact unknown (n = 1)"
    first, later = evaluation(None, mean=0.25), evaluation(None, mean=0.5)
    assert format_change(first, later) == "+25.0 points"
    # A mean over groups: each example has a value, but their mean is another number.
    before, after = evaluation(0, 1, 1, mean=0.5), evaluation(0, 1, 1, mean=0.9)
    assert format_change(before, after) == "+40.0 points"


def test_a_resumed_run_prints_the_change_since_its_start(tmp_path, capsys):
    short = [f"output_dir={tmp_path}", "name=run", "optim.prompts_per_step=2", "data.eval_limit=8"]
    short += ["optim.warmup_steps=0", "data.train_limit=8", "logging.trackers=[]", "resume=true"]
    run_dir = tmp_path / "run"

    def run(*overrides: str) -> dict[str, str]:
        train(load_settings("quickstart", [*short, *overrides]))
        return split(capsys.readouterr().out.splitlines())

    first = run("optim.max_steps=1")
    assert first["resume"] == f"{run_dir} has no checkpoint: the run begins with its first step"
    resumed = run("optim.max_steps=2")
    step = run_dir / "checkpoints/step-1"
    assert resumed["resume"] == f"{step}; optim.max_steps was 1 and is now 2"
    assert resumed["before"] == first["before"]
    assert "points [" in resumed["change"]
    again = run("optim.max_steps=2")
    step = run_dir / "checkpoints/step-2"
    assert again["resume"] == f"{step}; nothing is left to do of 2 steps"
    names = ("before", "after", "change")
    assert [again[name] for name in names] == [resumed[name] for name in names]
    config = (run_dir / "config.yaml").read_text()
    fewer = run("optim.max_steps=1")
    changed = "optim.max_steps was 2 and is now 1"
    assert fewer["resume"] == f"{step}; {changed}; nothing is left to do of 1 steps"
    assert not {*names, "model"} & fewer.keys()
    assert (run_dir / "config.yaml").read_text() == config
    rows = (tmp_path / "run/distributions.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1]


@pytest.mark.parametrize(
    ("step", "text", "last"),
    [
        (0, "the loaded model", "no step was better than the loaded model: try another "),
        (4, "{}/step-4", "vlm-grpo export {}/step-4 exported"),
        (2, "after step 2, not kept (checkpoint.keep_best=true keeps it)", "vlm-grpo export "),
    ],
)
def test_the_best_value_has_its_checkpoint_which_is_exported(step, text, last, tmp_path):
    checkpoint = tmp_path / "step-4"
    checkpoint.mkdir()
    result = TrainResult(None, None, (0.9, step), checkpoint, tmp_path)
    lines = str(result).splitlines()
    assert lines[0] == "best       90.0%, " + text.format(tmp_path)
    assert lines[-1].strip().startswith(last.format(tmp_path))
    later = replace(result, checkpoint=tmp_path / "step-5")
    exported = f"export {checkpoint if step == 4 else later.checkpoint} exported"
    assert (exported in str(later)) == (step != 0)
    assert ("next       vlm-grpo evaluate" in str(result), str(result).count("next")) == (True, 1)
    in_memory = str(replace(result, flag=None))  # rows that no command can read
    assert ("vlm-grpo evaluate" in in_memory, in_memory.count("next")) == (False, 1)
    error = replace(result, lower_is_better=True)
    assert str(error).splitlines()[0] == lines[0].replace("90.0%", "0.900")
