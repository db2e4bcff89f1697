"""``vlm-grpo sample`` on the embedded model."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run

from vlm_grpo.eval.prediction_log import PredictionLog


def test_both_files_are_of_the_same_samples(tmp_path, monkeypatch, succeed, capsys):
    monkeypatch.chdir(tmp_path)
    append = PredictionLog.append

    def append_and_stop(log: PredictionLog, *arguments: Any) -> None:
        append(log, *arguments)
        raise KeyboardInterrupt

    words = ["sample", "counting", "data.train_limit=6", "data.eval_limit=2", "--samples", "4"]
    monkeypatch.setattr(PredictionLog, "append", append_and_stop)
    status, _, err = run(capsys, *words, "--difficulty", "d.jsonl")
    assert (status, "the same command continues it" in err) == (130, True)
    assert not Path("d.jsonl").exists()
    monkeypatch.setattr(PredictionLog, "append", lambda *_: pytest.fail("it was sampled again"))
    assert "of 6 examples" in succeed(*words, "--difficulty", "d.jsonl")
    rates = [json.loads(line)["pass_rate"] for line in Path("d.jsonl").read_text().splitlines()]
    assert {*rates} <= {0, 0.25, 0.5, 0.75, 1}
    assert "vlm-grpo sft counting data.train=s.jsonl" in succeed(*words, "--out", "s.jsonl")
    kept = Path("s.jsonl").read_text().splitlines()
    assert len(kept) == sum(rate > 0 for rate in rates)
