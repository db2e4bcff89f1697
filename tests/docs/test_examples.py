"""The examples of the documentation: the minimal loop learns, and the notebooks run."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from types import ModuleType

import forked
import pytest
from notebook import run_notebook

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SMALL = {"train_limit": 128, "eval_limit": 32}


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_minimal_loop_is_at_most_100_lines_long():
    assert len((EXAMPLES / "loop.py").read_text("utf-8").splitlines()) <= 100


@pytest.mark.slow
def test_the_minimal_loop_learns_to_count(monkeypatch):
    loop = load_example("loop")
    # One epoch. With n = 250 a difference has a deviation of 0.04.
    source = "embedded:counting"
    data = DataSettings(train=source, train_limit=1280, eval=source, eval_limit=250)
    monkeypatch.setattr(loop, "load_examples", partial(load_examples, data=data))
    before, after = loop.train(steps=40)
    # Seeds 0, 1 and 2 gain 0.18, 0.18 and 0.16.
    assert after > before + 0.1


NOTEBOOKS: dict[str, tuple[dict[str, str], int, list[str]]] = {
    "first_run": (
        {'name="first_run",': f'name="first_run", data={SMALL},'},
        2,
        ["held-out accuracy:"],
    ),
    "your_own_data": (
        {'"train_limit": None': '"train_limit": 64, "eval_limit": 16'},
        1,
        ["broken.jsonl:1", "train.jsonl: 400 examples", "held-out accuracy:", "model.safetensors"],
    ),
    # What the exploits earn, and what the check says about them.
    "reward_hacking": (
        {},
        1,
        [
            "all numbers, at length   naive 1.30   careful 0.00",
            "two answers with or between earns 1.000, above 0.5",
            "Careful is sound on this data",
        ],
    ),
    "tool_environment": (
        {"eval_limit: 32": "eval_limit: 4"},
        1,
        ['"name": "magnify"', "OCR is sound on this data", "tools/called"],
    ),
}
"""By notebook: changes that make it short, the number of its pictures, and texts that it prints."""


def test_every_notebook_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_shows_its_results(name, tmp_path):
    changes, pictures, texts = NOTEBOOKS[name]
    notebook, log = EXAMPLES / f"{name}.ipynb", tmp_path / "log"
    process = forked.start(log, run_notebook, notebook, tmp_path, changes, STEPS="10")
    process.join(forked.TIMEOUT)
    assert process.exitcode == 0, log.read_text()
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown["pictures"] == pictures
    assert [text for text in texts if text not in shown["text"]] == []
