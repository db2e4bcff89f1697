"""Names of models: missing ones, and the best checkpoint by the metrics file."""

import json
import math
import re
from pathlib import Path

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.resolve import NO_TASK, find_checkpoint, resolve_model

SETTINGS = "task: <class Mine>\nmodel: embedded\ndata: {train: rows.jsonl}\n"


def test_a_hub_name_has_default_settings_and_a_missing_checkpoint_is_left_to_the_loader():
    resolved = resolve_model("a/model", ["seed=3"])
    assert (resolved.checkpoint, resolved.run) == (None, None)
    assert (resolved.settings.model, resolved.settings.task) == ("a/model", NO_TASK)
    assert resolved.settings.seed == 3
    assert find_checkpoint("other") == Path("other")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "model ./nowhere: there is no such folder"),
        ("a/b/c", "model a/b/c: there is no such folder"),
        ("runs/stoped", "model runs/stoped: there is no such folder (did you mean runs/stopped?)"),
        ("mine/tow", "model mine/tow: there is no such folder (did you mean mine/two?)"),
        (
            "embeded",
            "there is no model or run 'embeded' (did you mean embedded?): give a hub name such as "
            "Qwen/Qwen2.5-VL-3B-Instruct, a folder, or a run",
        ),
        ("empty", "empty has no model, no adapter and no checkpoints"),
        ("stopped", "runs/stopped has no complete checkpoint: continue the run with resume=true"),
    ],
)
def test_a_name_without_a_model_is_refused(tmp_path, monkeypatch, model, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("runs/stopped/checkpoints").mkdir(parents=True)
    Path("mine/two").mkdir(parents=True)
    Path("mine/two/config.yaml").touch()
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        resolve_model(model)


def test_the_best_step_of_a_class_in_memory_needs_an_evaluation(tmp_path):
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(SETTINGS)
    with pytest.raises(UserError, match=r"no checkpoint of .* was evaluated, so there is no best"):
        resolve_model(f"{tmp_path}@best")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "step-000001.jsonl").write_text("{}\n")
    summary = {"headline": "exact", "lower_is_better": False, "metrics": {"exact": 0.5}}
    (tmp_path / "evaluation" / "step-000001.json").write_text(json.dumps(summary))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/exact": 0.5}\n')
    with pytest.raises(UserError, match=r"recipe .*step-1/config\.yaml"):  # the step was found
        resolve_model(f"{tmp_path}@best")


def test_the_best_step_of_an_error_metric_is_the_lowest(tmp_path):
    benchmark = tmp_path / "far.yaml"
    benchmark.write_text("title: Far\ntask: counting\nmetric: absolute_error\nsplits: {test: 40}\n")
    settings = load_settings("counting", [f"evaluation.benchmark={benchmark}"])
    checkpoints = [tmp_path / f"checkpoints/step-{step}" for step in (1, 2, 3)]
    for folder in (tmp_path, *checkpoints):
        settings.save(folder / "config.yaml")
    # The error is lowest at step 2; the share of exact answers is highest at step 3.
    rows = [(0, math.nan, 0.1), (1, 1.0, 0.2), (2, 3.0, 0.9)]
    lines = [{"step": s, "eval/absolute_error": e, "eval/exact": x} for s, e, x in rows]
    lines.append({"step": 3})  # without an evaluation
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert resolve_model(f"{tmp_path}@best").checkpoint == checkpoints[1]
