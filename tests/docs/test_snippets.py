"""The Python blocks of docs/python.md and docs/batch-rewards.md run, and do what the pages say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from guide_commands import ROOT, run_blocks
from judge_server import Reply, run_judge
from PIL import Image

from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example

BATCHES = (ROOT / "docs/batch-rewards.md").read_text("utf-8")
ROW = Example("1", (), "What is it?", "dog")


def test_the_snippets_of_the_python_guide_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_blocks(ROOT / "docs/python.md")
    printed = capsys.readouterr().out
    assert "before, " in printed
    assert "fits       yes" in printed
    assert names["result"].checkpoint == Path("runs/dots/checkpoints/step-6")
    assert names["scores"].n == 12
    assert len(names["answers"]) == 3
    assert (names["folder"] / "model.safetensors").is_file()
    Image.open("answer.png").close()
    config = Path("runs/dots/config.yaml").read_text("utf-8")
    # What the page says about objects in saved settings; a class of a file has the file's path.
    assert "train: python" in config
    assert "task: <class Dots>" in config
    assert "tolerance: 4" in config


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return run_blocks(ROOT / "docs/batch-rewards.md")


def test_variety_is_judged_within_a_group(names):
    texts = ["a dog sleeps", "a dog runs", "a dog runs"]
    scores = RewardScorer()(names["Caption"](), texts, [ROW] * 3, None, [0, 0, 1])
    # "sleeps" and "runs" are the only words of their group that no other completion has.
    assert [score.rewards["variety"] for score in scores] == [1 / 3, 1 / 3, 1.0]
    assert scores[0].total == pytest.approx(1.0 + 0.2 / 3)


def test_a_reward_function_written_for_trl_is_called_with_its_lists(names):
    scores = RewardScorer()(names["Ported"](), ["dog", " dog\n", "cat", ""], [ROW] * 4)
    assert [score.total for score in scores] == [1.0, 1.0, 0.0, 0.0]


def test_a_service_is_asked_for_its_values(names):
    with run_judge(lambda body: Reply(body=b'{"toxicity": 0.25}')) as server:
        (score,) = RewardScorer()(names["Toxicity"](address=server.address), ["hi"], [ROW])
    assert score.total == 0.75
    assert [body for _, _, body in server.requests] == [{"text": "hi"}]


def test_the_table_lists_the_options_of_the_judge(names):
    text = BATCHES.partition("## A judge")[2]
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(listed) == set(vars(names["Judged"])["__annotations__"])
