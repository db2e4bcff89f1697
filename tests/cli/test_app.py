"""The program: help texts, version, start-up time, exit statuses and error messages."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
from commands import fails, run

HEAVY = {"torch", "transformers", "datasets", "pyarrow", "numpy", "scipy", "matplotlib"}


def test_help_shows_examples(capsys):
    status, out, _ = run(capsys, "--help")

    assert status == 0
    for word in ("train", "evaluate", "validate", "score", "tasks", "vlm-grpo train quickstart"):
        assert word in out


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "evaluate",
        "predict",
        "report",
        "plan",
        "export",
        "doctor",
        "new-task",
        "validate",
        "score",
        "data check",
    ],
)
def test_the_help_of_each_command_shows_an_example(capsys, command):
    status, out, _ = run(capsys, *command.split(), "--help")

    assert status == 0
    assert f"\n  vlm-grpo {command} " in out


def test_the_program_starts_without_importing_heavy_libraries():
    code = f"import sys, vlm_grpo.cli; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_version_is_printed_when_run_as_a_module():
    command = [sys.executable, "-m", "vlm_grpo.cli", "--version"]  # as launchers run it
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout == f"vlm-grpo {version('vlm-grpo')}\n"


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_an_unknown_setting_is_one_message(capsys, command):
    message = fails(capsys, command, "counting", "optim.learning_rate=1")

    assert message.startswith("error: recipe counting has wrong settings:")
    assert "did you mean optim.lr?" in message


@pytest.mark.parametrize(
    "arguments", [["train", "nothing", "--debug"], ["--debug", "train", "nothing"]]
)
def test_debug_anywhere_shows_the_traceback(capsys, arguments):
    status, _, err = run(capsys, *arguments)

    assert status == 2
    assert "Traceback" in err
    assert "there is no recipe 'nothing'" in err


def test_an_unknown_option_or_command_is_one_message(capsys):
    assert "--foo" in fails(capsys, "train", "counting", "--foo")
    assert "fly" in fails(capsys, "fly")
