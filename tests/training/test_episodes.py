"""Training with an environment: episodes are sampled turn by turn, and again bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_environments
from small_runs import assert_same_run, read_metrics, save_tiny_model, small_run, stop_run

from vlm_grpo.config.run import Settings
from vlm_grpo.training.trainer import train

PEEK = f"{small_environments.__file__}:Peek"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make_settings(folder: Path, source: Path, **changes: Any) -> Settings:
    folder.mkdir(exist_ok=True)
    options = {"environment": {"name": PEEK, "max_turns": 3}}
    rollout = {"num_generations": 4, "max_completion_length": 30}
    data = {"eval": "embedded:ocr", "eval_limit": 2}
    return small_run(folder, source, task_options=options, rollout=rollout, data=data, **changes)


def test_a_run_resumes_bit_for_bit_from_the_middle_of_an_episode(tmp_path, source):
    whole, stopped = (make_settings(tmp_path / name, source) for name in ("whole", "stopped"))
    train(whole)
    stop_run(stopped, 3, 20)
    train(stopped.model_copy(update={"resume": True}))
    runs = [settings.run_dir for settings in (whole, stopped)]
    assert_same_run(*runs)
    for row in read_metrics(runs[0]):
        # Rounding of float32: what was sampled turn by turn has the log-probs of one pass.
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["rewards/turns/mean"] > 1 / 3  # some calls in every step
        assert row["completions/turns"] == pytest.approx(3 * row["rewards/turns/mean"])
        assert row["tools/calls"] == pytest.approx(row["completions/turns"] - 1 + row["tools/cut"])
        assert row["tokens/observed"] > 0
    assert {"eval/tools/gain", "eval/letters_without_tools"} <= row.keys()
    (line, *_) = (runs[0] / "samples" / "held-out-000004.jsonl").read_text().splitlines()
    first, *_ = json.loads(line)["completions"][0]["turns"]
    assert (first["observed"]["images"], len(first["pictures"])) == ([[28, 28]], 1)
