"""``vlm-grpo sample`` on the embedded model, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import fails, run, write_jsonl

from vlm_grpo.eval.generate import PredictionLog

FEW = ["data.train_limit=6", "data.eval_limit=2"]
CORRECTED = "objective.sampler_correction=token"


def test_both_files_are_of_the_same_samples(tmp_path, monkeypatch, succeed, capsys):
    monkeypatch.chdir(tmp_path)
    append = PredictionLog.append

    def append_and_stop(log: PredictionLog, *arguments: Any) -> None:
        append(log, *arguments)
        raise KeyboardInterrupt

    words = ["sample", "counting", *FEW, "--samples", "4"]
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["counting", "evaluation.samples=3"], "evaluation.samples has no effect"),
        (["counting", "--out", "missing/d.jsonl"], "its folder does not exist"),
        (["counting", "--out", "rows.jsonl"], "--out rows.jsonl exists: delete it"),
        (["counting", "--out", "rows.jsonl"], "call are in runs/counting/sampled and are not"),
        (["counting", "rollout.top_p=0.9", CORRECTED], "rollout.top_p=0.9 has no effect here"),
        (["counting", "rollout.min_p=0.1", CORRECTED], "add rollout.min_p=null"),
        (["counting", "--difficulty", "rows.jsonl"], "--difficulty rows.jsonl exists: delete it"),
        (["counting", "--difficulty", "d.jsonl", "--keep", "2"], "--keep need --out"),
        (["counting", "--concurrency", "3"], "--concurrency needs --server"),
        (["counting", "--checkpoint", "missing"], "checkpoint missing is not a folder"),
        (["counting", "data.filter=x"], "is no filter"),
    ],
)
def test_bad_input_ends_with_status_2(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", {"question": "?", "answer": 3})
    assert message in fails(capsys, "sample", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
