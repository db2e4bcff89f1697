"""Hostile input: code in models and datasets, and names that are paths elsewhere."""

import ast
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dataset_files import write_files
from report_runs import load_few_examples, make_group
from small_runs import save_tiny_model

from vlm_grpo import Settings, UserError, cli, load_task
from vlm_grpo.data.loading import load_examples
from vlm_grpo.model.loading import load_model
from vlm_grpo.report.samples import write_held_out, write_samples

ROOT = Path(__file__).parents[1]


def make_settings(model: Path, **policy: Any) -> Settings:
    values = {"task": "counting", "model": str(model), "data": {"train": "embedded:counting"}}
    return Settings.model_validate(values | {"policy": {"dtype": "float32", **policy}})


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the path of a file that foreign code creates when it runs."""
    return tmp_path / "foreign-code-was-here"


@pytest.fixture
def model_with_code(tmp_path: Path, marker: Path) -> Path:
    code = (
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig\n"
        "class Config(PretrainedConfig):\n    model_type = 'foreign'\n"
    )
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForImageTextToText"), "foreign.Config")
    config = {"model_type": "foreign", "auto_map": auto_map}
    return write_files(tmp_path / "model", {"foreign.py": code, "config.json": config})


def test_code_of_a_model_runs_only_if_it_is_trusted_and_with_a_warning(
    model_with_code, marker, tmp_path, monkeypatch, caplog
):
    with pytest.raises(UserError, match="trust_remote_code"):
        load_model(make_settings(model_with_code))
    assert not marker.exists()
    cache = str(tmp_path / "cache")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    with pytest.raises((UserError, ImportError, AttributeError, TypeError)):
        load_model(make_settings(model_with_code, trust_remote_code=True))
    assert marker.exists()
    assert f"running the Python code that comes with {model_with_code}" in caplog.text


class Bomb(str):
    """The path of a file that is created when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, (str(self), "w")


def test_pickled_weights_are_refused(tmp_path, marker):
    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker), protocol=2))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_model(make_settings(folder))
    assert not marker.exists()
    with pickle.loads((folder / "pytorch_model.bin").read_bytes()):
        assert marker.exists()  # unpickling does run its code


def test_the_script_of_a_dataset_is_not_run(tmp_path, marker):
    code = f"open({str(marker)!r}, 'w').close()\n"
    folder = write_files(tmp_path / "foreign", {"foreign.py": code})
    with pytest.raises(UserError, match="cannot be loaded"):
        load_examples(f"hf:{folder}", load_task("counting"))
    assert not marker.exists()


TASK = """from vlm_grpo.tasks.counting import Counting
class Foreign(Counting):
    pass
def function(*values):
    pass
"""
COMMANDS = (
    "plan FILE --gpu 24GB", "train FILE", "sft FILE", "sample FILE --difficulty OUT",
    "evaluate FILE", "predict RUN --question ?", "export RUN@best OUT",
)  # fmt: skip


def plant(folder: Path, marker: Path, values: dict[str, Any]) -> str:
    """Write a run's folder with files of code, and return its first recipe."""
    code = f"open({str(marker)!r}, 'w').close()\n{TASK}"
    common: dict[str, Any] = {
        "name": "run", "task": "counting", "model": "embedded", "output_dir": str(folder / "runs"),
        "data": {"train": "embedded:counting", "eval": "embedded:counting", "train_limit": 2,
                 "eval_limit": 2},
        "optim": {"max_steps": 1},
    }  # fmt: skip
    recipe = json.dumps(common | values)
    files = {"foreign.py": code, "foreign_module.py": code, "config.yaml": recipe}
    files |= {"checkpoints/step-1/config.json": "{}", "checkpoints/step-1/config.yaml": recipe}
    return str(write_files(folder, files) / "config.yaml")


@pytest.mark.parametrize(
    ("values", "commands"),
    [
        ({"task": "FOLDER/foreign.py"}, COMMANDS),
        ({"task": "FOLDER/checkpoints/../foreign.py:Foreign"}, COMMANDS[:1]),
        ({"task": "foreign_module:Foreign"}, COMMANDS[:1]),
        ({"output_dir": "FOLDER", "task": "${output_dir}/foreign.py"}, COMMANDS[:1]),
        ({"data": {"train": [{"source": "embedded:counting", "task": "FOLDER/foreign.py"}]}}, None),
        ({"data": {"train": [{"source": "embedded:counting", "columns": {"task": "kind"},
          "tasks": {"FOLDER/foreign.py": {}}}]}}, None),
        ({"objective": {"loss": "FOLDER/foreign.py:function"}}, ("train FILE",)),
        ({"objective": {"advantage_estimator": "FOLDER/foreign.py:function"}}, ("train FILE",)),
        ({"methods": ["FOLDER/foreign.py"]}, COMMANDS[:1]),
        ({"task_options": {"environment": "FOLDER/foreign.py:Foreign"}}, COMMANDS),
        ({"task_options": {"environment": {"name": "FOLDER/foreign.py"}}}, COMMANDS[:1]),
        ({"methods": [{"file": "FOLDER/foreign.py"}]}, COMMANDS[:1]),
        ({"evaluation": {"benchmark": "FOLDER/benchmark.yaml"}}, ("train FILE",)),
        ({"rollout": {"sampler": "vllm", "vllm": {"python": "FOLDER/foreign.py"}}},
         ("serve FILE --for-rollouts",)),
        ({"model": "MODEL", "policy": {"trust_remote_code": True}}, COMMANDS[:1]),
        ({"task": "judged", "task_options": {"address": "http://foreign/v1", "judge_model": "m",
          "api_key_env": "HF_TOKEN"}}, COMMANDS),
    ],
)  # fmt: skip
def test_code_that_only_a_file_names_is_not_run(
    values, commands, tmp_path, marker, model_with_code, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    benchmark = {"title": "t", "task": f"{tmp_path}/foreign.py", "metric": "exact"}
    (tmp_path / "benchmark.yaml").write_text(json.dumps(benchmark))
    text = json.dumps(values).replace("FOLDER", str(tmp_path))
    recipe = plant(tmp_path, marker, json.loads(text.replace("MODEL", str(model_with_code))))
    for command in commands or COMMANDS[:2]:
        with pytest.raises(SystemExit, match="2"):
            cli.main(command.replace("FILE", recipe).replace("RUN", str(tmp_path)).split())
        error = capsys.readouterr().err
        assert re.search("names (code that this command would run|the address that gets)", error)
        assert "foreign" in error or str(model_with_code) in error
        assert "--trust-code" in error
        assert not marker.exists(), command


@pytest.mark.parametrize("word", ["--trust-code", "task=foreign.py", "--task=foreign.py"])
def test_code_runs_if_the_command_says_so(word, tmp_path, marker, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plant(tmp_path, marker, {"task": f"{tmp_path}/foreign.py"})
    with pytest.raises(SystemExit, match="2"):  # there is no such image
        cli.main(["predict", str(tmp_path), word, "--question", "?", "--image", "none.png"])
    assert marker.exists()


# A worker process unpickles what its parent process sends, which unpickles its answers. The reader
# of published pickles finds no class (tests/data_scripts/test_converters.py).
ALLOWED = {
    *((f"vlm_grpo/utils/worker_{name}.py", "pickle.loads") for name in ("pool", "process")),
    ("vlm_grpo/task/scorer.py", "pickle.loads"),
    ("data_scripts/readers.py", "pickle.Unpickler"),
}
REFUSED = {
    *("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "torch.loads"),
    *("marshal.load", "marshal.loads", "shell=True", "allow_pickle=True", "weights_only=False"),
}


def find_calls(path: Path) -> set[str]:
    """Return the names that a file calls or derives from, and the options that it passes."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            found |= set(map(ast.unparse, node.bases))
        if isinstance(node, ast.Call):
            found |= {ast.unparse(node.func), *map(ast.unparse, node.keywords)}
    return found


def test_the_code_evaluates_and_unpickles_nothing_else():
    folders = [ROOT / name for name in ("vlm_grpo", "tasks", "data_scripts")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 80  # the scan covers the sources
    found = {(p.relative_to(ROOT).as_posix(), c) for p in files for c in find_calls(p) & REFUSED}
    assert found == ALLOWED


@pytest.mark.parametrize(
    "name", ["../../evil", "/tmp/evil", "a\x00b", "x" * 5000, "con:..\\evil", "\n<b>"]
)
def test_no_name_from_the_data_becomes_a_path(name, tmp_path):
    task = load_task("counting")
    example = load_few_examples("counting", task)[0]
    images = tuple(replace(image, name=name) for image in example.images)
    example = replace(example, id=name, images=images)
    run = tmp_path / "deep" / "run"
    group = make_group(task, example, ["1", "2"])
    write_samples(run / "samples", 3, [group], [[0.5, -0.5]], task)
    row = {"id": name, "output": "1", "answer": 1, "rewards": {"exact": 0.0, "closeness": 0.0}}
    write_held_out(run / "samples", 3, task, [example], [{**row, "metrics": {}}])
    files = [path.relative_to(run) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in files} == {"samples"}
    expected = {"step-000003.jsonl", "held-out-000003.jsonl"}
    assert expected <= {path.name for path in files}
    for path in files:
        # images: 32 hexadecimal digits of a hash
        assert path.name in expected or re.fullmatch("[0-9a-f]{32}", path.stem)
