"""The examples of the documentation: the minimal loop learns, the notebooks and the blocks of pages
run, and do what the pages say."""

import json
import re
import runpy
from functools import partial
from pathlib import Path

import forked
import pytest
from guide_commands import ROOT, run_blocks
from judge_server import Reply, run_judge
from notebook import run_notebook
from PIL import Image

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example

EXAMPLES = ROOT / "docs" / "examples"
ROW = Example("1", (), "What is it?", "dog")


@pytest.mark.slow
def test_the_minimal_loop_learns_to_count(monkeypatch):
    train = runpy.run_path(str(EXAMPLES / "loop.py"))["train"]
    # One epoch. With n = 250 a difference has a deviation of 0.04.
    source = "embedded:counting"
    data = DataSettings(train=source, train_limit=1280, eval=source, eval_limit=250)
    monkeypatch.setitem(train.__globals__, "load_examples", partial(load_examples, data=data))
    before, after = train(steps=40)
    # Seeds 0, 1 and 2 gain 0.18, 0.18 and 0.16.
    assert after > before + 0.1


SMALL = {"train_limit": 64, "eval_limit": 8}
CHANGES = {
    "first_run": {
        'name="first_run",': f'name="first_run", data={SMALL},',
        '": 10, "lr"': '": 2, "prompts_per_step": 4, "lr"',
    },
    "your_own_data": {
        '"train_limit": None': '"train_limit": 64, "eval_limit": 16',
        '"prompts_per_step": 16': '"prompts_per_step": 4',
    },
    "tool_environment": {
        "train_limit: 4096": "train_limit: 64",
        "eval_limit: 32": "eval_limit: 4",
        "prompts_per_step: 32": "prompts_per_step: 4",
    },
}
"""Changes that make a notebook short."""
OWN_DATA = ("broken.jsonl:1", "train.jsonl: 400 examples", "held-out accuracy:")
EXPLOITS = "all numbers, at length   naive 1.30   careful 0.00"
UNSOUND = "two answers with or between earns 1.000, above 0.5"
PRINTED = {
    "first_run": ("held-out accuracy:",),
    "your_own_data": (*OWN_DATA, "model.safetensors"),
    "reward_hacking": (EXPLOITS, UNSOUND, "Careful is sound on this data"),
    "tool_environment": ('"name": "magnify"', "OCR is sound on this data", "tools/called"),
}
"""Texts that a notebook prints."""


def test_every_notebook_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_a_notebook_runs_and_shows_its_results(name, tmp_path):
    given = (EXAMPLES / f"{name}.ipynb", tmp_path, CHANGES.get(name, {}))
    process = forked.start(log := tmp_path / "log", run_notebook, *given, STEPS="2")
    process.join(forked.TIMEOUT)
    assert process.exitcode == 0, log.read_text()
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown["pictures"] == (2 if name == "first_run" else 1)
    assert [text for text in PRINTED[name] if text not in shown["text"]] == []


def test_the_snippets_of_the_python_guide_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = {'"warmup_steps": 0': '"warmup_steps": 0, "prompts_per_step": 4'}
    short['data={"eval_limit": 50}'] = f"data={SMALL}"
    names = run_blocks(ROOT / "docs/python.md", short)
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


def test_rewards_of_groups_of_ported_functions_and_of_services_do_what_their_page_says():
    page, score = ROOT / "docs/batch-rewards.md", RewardScorer()
    names = run_blocks(page)
    texts = ["a dog sleeps", "a dog runs", "a dog runs"]
    scores = score(names["Caption"](), texts, [ROW] * 3, None, [0, 0, 1])
    # "sleeps" and "runs" are the only words of their group that no other completion has.
    assert [score.rewards["variety"] for score in scores] == [1 / 3, 1 / 3, 1.0]
    assert scores[0].total == pytest.approx(1.0 + 0.2 / 3)
    scores = score(names["Ported"](), ["dog", " dog\n", "cat", ""], [ROW] * 4)
    assert [score.total for score in scores] == [1.0, 1.0, 0.0, 0.0]
    with run_judge(lambda body: Reply(body=b'{"toxicity": 0.25}')) as server:
        (scored,) = score(names["Toxicity"](address=server.address), ["hi"], [ROW])
    assert scored.total == 0.75
    assert [body for _, _, body in server.requests] == [{"text": "hi"}]
    text = page.read_text("utf-8").partition("## A judge")[2]  # with a table of its options
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(listed) == set(vars(names["Judged"])["__annotations__"])
