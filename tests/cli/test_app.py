"""The program: help texts, version, start-up time, exit statuses and error messages."""

import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from commands import fails, run, run_python, write_jsonl
from PIL import Image
from pydantic import ValidationError

from vlm_grpo.cli import app as app_module
from vlm_grpo.cli.app import MOVED, app, explain
from vlm_grpo.config.data import DataSettings
from vlm_grpo.errors import UserError

HEAVY = {"torch", "transformers", "datasets", "pyarrow", "numpy", "scipy", "matplotlib"}
COMMANDS = (
    *("train", "sft", "sample", "evaluate", "predict", "serve", "plan", "report", "export"),
    *("doctor", "settings", "new-task", "new-environment", "check"),
)
ROWS = "--data embedded:counting"
SCORED = f"{ROWS} --predictions none.jsonl"
COUNTED = f"evaluate counting {SCORED}"
CORRECTED = "objective.sampler_correction=token"
ASKED = "embedded --question ? --image"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_shows_an_example(succeed, capsys, command):
    assert f"\n  vlm-grpo {command} " in succeed(command, "--help")
    assert command in run(capsys, "--help")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doctor embedded --dtype int8", "'int8' is not one of 'float32', 'bfloat16'"),
        ("doctor embedded --image none.png", "image none.png cannot be read"),
        ("export embedded out --dtype int8", "dtype is 'int8'; it must be float32 or bfloat16"),
        ("export embedded out", "there are no trained weights to export"),
        ("plan counting --gpu X9", "is not in the table"),
        ("plan counting --devices 0", "--devices"),
        ("plan counting --device 8", "No such option: --device"),
        ("report countin", "did you mean counting?): give a run's folder; runs/ has counting"),
        ("report counting countin", "runs/ has counting"),
        ("report --sweep optim.lr counting", "needs several runs"),
        ("report --sweep a --sweep b --sweep c counting counting", "at most two settings"),
        ("settings optim.rl", "did you mean optim.lr?"),
        ("train counting --foo", "--foo"),
        ("fly", "fly"),
        ("check nope.py", "there is no task file nope.py"),
        ("check counting policy.max_pixels=0", "policy.max_pixels"),
        ("check counting --limit 0", "--limit"),
        ("check ocr --split test", "'test' is not one of 'train', 'eval'"),
        ("check counting --preview a.pdf", "--preview a.pdf: give a file with the suffix .html"),
        ("check counting --limit 1 --preview no/a.html", "no/a.html cannot be written: No"),
        ("sample counting evaluation.samples=3", "evaluation.samples has no effect"),
        ("sample counting --out missing/d.jsonl", "its folder does not exist"),
        ("sample counting --out a.jsonl", "--out a.jsonl exists: delete it"),
        ("sample counting --out a.jsonl", "call are in runs/counting/sampled and are not"),
        (f"sample counting rollout.top_p=0.9 {CORRECTED}", "rollout.top_p=0.9 has no effect here"),
        (f"sample counting rollout.min_p=0.1 {CORRECTED}", "add rollout.min_p=null"),
        ("sample counting --difficulty a.jsonl", "--difficulty a.jsonl exists: delete it"),
        ("sample counting --difficulty d.jsonl --keep 2", "--keep need --out"),
        ("sample counting --concurrency 3", "--concurrency needs --server"),
        ("sample counting --checkpoint missing", "checkpoint missing is not a folder"),
        ("sample counting data.filter=x", "is no filter"),
        (f"evaluate tallyqa {ROWS}", "model has no value: add model="),
        (f"evaluate tallyqa {ROWS} --frame permille", "--frame needs --predictions"),
        ("evaluate counting --task ocr", "there is no option --task: settings have no dashes"),
        (f"evaluate tallyqa {SCORED} --checkpoint runs", "leave out --checkpoint"),
        (f"evaluate tallyqa {SCORED} --frame permil", "did you mean permille"),
        (f"evaluate tallyqa {ROWS} model=embedded --checkpoint no", "no is not a folder"),
        (f"evaluate tallyqa {ROWS} model=embedded task_options.tagz=true", "unknown option tagz"),
        ("evaluate counting --checkpoint nowhere", "checkpoint nowhere is not a folder"),
        ("evaluate counting --predictions p.jsonl", "give --data"),
        (f"{COUNTED} --frame permil", "did you mean permille?"),
        (COUNTED, "none.jsonl cannot be read"),
        (f"{COUNTED} frame=permille", "frame is not a task option with --predictions"),
        ("evaluate counting --json", "--json needs a task and --predictions"),
        (f"predict {ASKED} none.png", "image none.png cannot be read: No such file"),
        (f"predict {ASKED} a.jsonl", "corrupt or of a format other than"),
        (f"predict {ASKED} thin.png", "thin.png cannot be resized for the model: absolute"),
        (f"predict {ASKED} a.png --task countin", "did you mean counting?"),
        (f"predict {ASKED} a.png --out a.png", "a.png exists already"),
        (f"predict {ASKED} a.png --out no/b.png", "there is no folder no"),
        (f"predict {ASKED} a.png --out b.txt", "end the name in .png"),
        (f"predict {ASKED} a.png optim.rl=1", "did you mean optim.lr?"),
        (f"predict {ASKED} a.png --frame permille", "--frame needs --server"),
        (f"predict {ASKED} a.png --task choice", "as choice its options, give one: --answer JSON"),
        (f"predict {ASKED} a.png --task choice --answer {{cat", "--answer {cat: it is no JSON"),
        ("predict ./nowhere --question ?", "error: model ./nowhere: there is no such folder\n"),
        ("export ./nowhere out", "error: model ./nowhere: there is no such folder\n"),
        ("predict none --question ?", "there is no model or run 'none'"),
        ("serve embedded", "give the Python of an environment with vLLM by --python"),
        ("serve embedded --python /no/python", "there is no program /no/python: give the"),
        (f"serve nothing-there --python {sys.executable}", "there is no model or run"),
        (f"serve no --for-rollouts --python {sys.executable}", "there is no model or run"),
    ],
)
def test_wrong_arguments_are_one_message(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("os.execve")  # serve would replace this process
    (tmp_path / "runs/counting").mkdir(parents=True)
    write_jsonl(tmp_path / "a.jsonl", {"question": "?", "answer": 3})
    for name, size in (("a.png", (84, 84)), ("thin.png", (900, 3))):
        Image.new("RGB", size).save(name)  # 300 : 1; Qwen's resize accepts up to 200 : 1
    before = sorted(tmp_path.rglob("*"))
    assert message in fails(capsys, *words.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_the_program_starts_as_a_module_without_importing_heavy_libraries():
    code = f"import sys, vlm_grpo.cli; print(sorted({HEAVY} & set(sys.modules)))"
    assert run_python("-c", code) == "[]\n"
    shown = run_python("-m", "vlm_grpo.cli", "--version")  # as launchers run it
    assert shown == f"vlm-grpo {version('vlm-grpo')}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has libgomp on Linux only")
@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "passive"}, {"LD_PRELOAD": "libomp.so"}])
def test_threads_wait_awake_unless_the_user_says_how(given, monkeypatch):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setitem(sys.modules, "torch", sys)
    app_module._wait_awake()  # noqa: SLF001
    assert environment == given  # torch has read its settings already
    monkeypatch.delitem(sys.modules, "torch")
    app_module._wait_awake()  # noqa: SLF001
    assert environment == (given or app_module.WAITING)


@pytest.mark.parametrize("words", ["train nothing --debug", "--debug train nothing"])
def test_debug_anywhere_shows_the_traceback(capsys, words):
    status, _, err = run(capsys, *words.split())
    assert (status, "Traceback" in err, "there is no recipe 'nothing'" in err) == (2, True, True)


ENDED = """import logging, sys; from vlm_grpo.cli import app
try: app.main(['--version'])
except SystemExit: """
"""A program that prints the version and then runs the statement that is appended."""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_letters_that_the_output_cannot_encode_are_escaped(unbuffered):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", f"{ENDED}print('0 → 1'); print('é', file=sys.stderr)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("0 \\u2192 1\n"), done.stderr
    assert done.stderr == "\\xe9\n"


def test_a_terminal_obeys_no_control_characters_of_rows_and_answers():
    terminal, end = os.openpty()
    command = [sys.executable, "-c", f"{ENDED}print('\\x1b[31m'); logging.warning('\\x9b')"]
    done = subprocess.run(command, stdout=end, stderr=subprocess.PIPE, text=True)
    shown = os.read(terminal, 1000).decode()
    os.close(terminal)
    os.close(end)
    assert shown.endswith("\\x1b[31m\r\n"), done.stderr
    assert done.stderr == "WARNING: \\x9b\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file", "/nowhere/x"), "/nowhere/x: No such file"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "a text file is not in UTF-8: 'utf-8'"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "missing or broken: No module"),
        (ImportError("`pip install num2words`"), "is missing or broken: `pip install num2words`"),
        (UserError("do this"), "do this"),
        # Others keep their traceback.
        (OSError("no file is named"), None),
        (ModuleNotFoundError("No module named 'vlm_grpo.x'", name="vlm_grpo.x"), None),
        (ValueError("a bug"), None),
        (RecursionError("a bug"), None),
    ],
)
def test_errors_that_the_user_can_fix_have_a_message(error, message):
    found = explain(error)
    assert found is None if message is None else message in (found or "")


def test_settings_built_in_python_are_explained_like_those_of_a_recipe():
    values: Any = {"train": "a", "trian": "b"}
    message = r"^DataSettings has .*\n.* trian \(did you mean train\?\)$"
    with pytest.raises(UserError, match=message):
        DataSettings(**values)
    with pytest.raises(ValidationError) as invalid:
        DataSettings.model_validate({"train": 3})
    assert explain(invalid.value) == (
        "train.source: Value error, should be text, or a list of sources: give rows as an "
        "argument, train(settings, data=rows)"
    )


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_command_names_the_new_one(capsys, old, new):
    assert f"vlm-grpo {old} has become {new}" in fails(capsys, old, "--help")
    assert new.split()[1] in {getattr(c.callback, "__name__", "") for c in app.registered_commands}
