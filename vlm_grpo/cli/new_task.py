"""``vlm-grpo new-task`` and ``new-environment``: write a new file, which runs, and its test."""

import keyword
import re
import sys
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from vlm_grpo.errors import UserError

LONGEST_NAME = 40
"""Largest length of a name; a longer one would not fit into the lines of the templates."""


def new_task(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the task, for example read_clock.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path(),
) -> None:
    """Write a new task and its test from a template.

    \b
    vlm-grpo new-task read_clock
    vlm-grpo new-task read_clock --out my_tasks
    """
    file = _write(name, out, "task", "TASK --data YOUR.jsonl")
    typer.echo(f"  vlm-grpo train {file} model=Qwen/Qwen2.5-VL-3B-Instruct \\")
    typer.echo("      data.train=YOUR.jsonl data.eval=HELD_OUT.jsonl \\")
    typer.echo("      policy.lora.r=64 optim.lr=1e-5")


def new_environment(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the environment, for example ruler.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path(),
) -> None:
    """Write a new environment, whose tools a model calls before it answers, and its test.

    \b
    vlm-grpo new-environment ruler
    """
    file = _write(name, out, "environment", "counting environment=TASK")
    typer.echo(f"  vlm-grpo train quickstart task_options.environment={file} \\")
    typer.echo("      rollout.max_completion_length=200")


def _write(name: str, out: Path, kind: str, checked: str) -> Path:
    """Write the files of a kind, and print the first commands to run; return the path."""
    file, test = write_task(name, out, kind)
    typer.echo(f"wrote {file} and {test}; next:\n  python -m pytest {test}")
    typer.echo(f"  vlm-grpo check {checked.replace('TASK', str(file))}")
    return file


def write_task(name: str, folder: Path, kind: str = "task") -> list[Path]:
    """Write ``NAME.py`` and ``test_NAME.py`` of a task or an environment, which may not exist yet;
    return their paths."""
    _check_name(name)
    words = name.split("_")
    values = {
        "name": name,
        "title": " ".join(words).strip().capitalize(),
        "class_name": "".join(word.capitalize() for word in words),
    }
    templates = resources.files("vlm_grpo") / "templates"
    files = {f"{name}.py": f"{kind}.py.txt", f"test_{name}.py": f"test_{kind}.py.txt"}
    texts = {
        folder / file: Template((templates / template).read_text("utf-8")).substitute(values)
        for file, template in files.items()
    }
    existing = [str(path) for path in texts if path.exists()]
    if existing:
        raise UserError(f"{' and '.join(existing)} exists: give another name, or another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:  # "x": never overwrite a file
                file.write(text)
    except OSError as error:
        raise UserError(f"folder {folder} cannot be written to: {error.strerror}") from error
    return list(texts)


def _check_name(name: str) -> None:
    problems = {
        "is not a name for a file: use lowercase letters, digits and single underscores, starting "
        "with a letter, for example read_clock": not re.fullmatch(
            r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name
        ),
        f"is too long for a name: {LONGEST_NAME} letters at most": len(name) > LONGEST_NAME,
        "is a keyword of Python: give another name": keyword.iskeyword(name),
        f"is a module of Python's standard library, which {name}.py would shadow: give another "
        "name": name in sys.stdlib_module_names,
        "would be collected as a test: leave out test_": name.startswith("test_"),
    }
    for problem, is_found in problems.items():
        if is_found:
            raise UserError(f"{name!r} {problem}")
