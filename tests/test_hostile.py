"""Input that wants to be run, or to be written elsewhere: models, datasets, names."""

from __future__ import annotations

import ast
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import few_examples, group
from tiny_models import tiny_model

from vlm_grpo.config.run import Settings
from vlm_grpo.data import load_examples
from vlm_grpo.errors import UserError
from vlm_grpo.grpo.nonfinite import MAX_OVERFLOWS, Overflows
from vlm_grpo.model.loading import load_model
from vlm_grpo.registry import load_task
from vlm_grpo.tracking.samples import write_held_out, write_samples

ROOT = Path(__file__).parents[1]


def settings(model: Path, **policy: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": "counting",
            "model": str(model),
            "data": {"train": "embedded:counting"},
            "policy": {"dtype": "float32", **policy},
        }
    )


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists once foreign code has run."""
    return tmp_path / "foreign-code-was-here"


# Code that comes with a model.


@pytest.fixture
def model_with_code(tmp_path: Path, mark: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "theirs.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig\n"
        "class Config(PretrainedConfig):\n    model_type = 'theirs'\n"
    )
    auto_map = {"AutoConfig": "theirs.Config", "AutoModelForImageTextToText": "theirs.Config"}
    (folder / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": auto_map}))
    return folder


def test_a_models_code_is_not_run_unless_asked_for(model_with_code: Path, mark: Path) -> None:
    with pytest.raises(UserError, match="trust_remote_code"):
        load_model(settings(model_with_code))
    assert not mark.exists()


def test_where_it_is_asked_for_that_is_said(
    model_with_code: Path,
    mark: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    with pytest.raises((UserError, ImportError, AttributeError, TypeError)):
        load_model(settings(model_with_code, trust_remote_code=True))
    assert mark.exists()  # the switch does something, so the test above could fail
    assert f"Python code that {model_with_code} brings along is run" in caplog.text


class Bomb:
    """Unpickled, it opens a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_pickled_weights_run_no_code(tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "model"
    model, processor = tiny_model("qwen2_5_vl")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark), protocol=2))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_model(settings(folder))
    assert not mark.exists()
    with pickle.loads((folder / "pytorch_model.bin").read_bytes()):
        assert mark.exists()  # the bomb is real


def test_a_datasets_script_is_not_run(tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "theirs.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_examples(f"hf:{folder}", load_task("counting"))
    assert not mark.exists()


# What our own code may call.

# pickle: between the processes of one run; and reading plain data, with every name refused.
ALLOWED = {("scorer.py", "pickle.loads"), ("judge.py", "pickle.dumps")}
REFUSED = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"} | {
    f"{module}.{name}" for module in ("pickle", "torch", "marshal") for name in ("load", "loads")
}


def _calls(path: Path) -> set[str]:
    """Names of what a file calls, and switches that it passes, as ``shell=True``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
            for word in node.keywords:
                if word.arg in ("shell", "allow_pickle", "weights_only"):
                    found.add(f"{word.arg}={ast.unparse(word.value)}")
    return found


def test_nothing_is_evaluated_or_unpickled() -> None:
    files = [
        p for name in ("vlm_grpo", "tasks", "data_scripts") for p in (ROOT / name).rglob("*.py")
    ]
    assert len(files) > 80  # the scan has found the sources
    bad = REFUSED | {"shell=True", "allow_pickle=True", "weights_only=False"}
    found = {(path.name, call) for path in files for call in _calls(path) & bad}
    assert found - ALLOWED == set()


# Names that come from the data.


@pytest.mark.parametrize(
    "name", ["../../evil", "/tmp/evil", "a\x00b", "x" * 5000, "con:..\\evil", "\n<b>"]
)
def test_names_of_the_data_get_into_no_path(name: str, tmp_path: Path) -> None:
    task = load_task("counting")
    example = few_examples("counting", task)[0]
    images = tuple(replace(image, name=name) for image in example.images)
    example = replace(example, id=name, images=images)
    run = tmp_path / "deep" / "run"
    groups = [group(task, example, ["1", "2"])]
    write_samples(run / "samples", 3, groups, [[0.5, -0.5]], task)
    row = {"id": name, "output": "1", "answer": 1, "rewards": {"exact": 0.0, "closeness": 0.0}}
    write_held_out(run / "samples", 3, task, [example], [{**row, "metrics": {}}])
    watch = Overflows(run, rank=0)
    watch.count = MAX_OVERFLOWS - 1
    with pytest.raises(UserError, match="not finite"):
        watch.note(4, True, groups, torch.zeros(2))

    files = [path.relative_to(run) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in files} == {"samples", "overflow"}
    plain = {"step-000003.jsonl", "held-out-000003.jsonl", "step-000004-rank-0.jsonl"}
    assert plain <= {path.name for path in files}
    for path in files:
        if path.name not in plain:  # pictures: 32 digits of a hash
            assert len(path.stem) == 32
            assert int(path.stem, 16) >= 0
