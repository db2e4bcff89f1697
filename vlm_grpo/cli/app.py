"""The program ``vlm-grpo``: its commands, its error messages and its exit statuses.

At module level the commands import only what their help texts need. Libraries that are slow to
import (numpy, scipy, torch, transformers) are imported inside the command's function, so that
``vlm-grpo --help`` responds immediately.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from pydantic import ValidationError

from vlm_grpo.cli import data
from vlm_grpo.cli.doctor import doctor
from vlm_grpo.cli.evaluate import evaluate
from vlm_grpo.cli.export import export
from vlm_grpo.cli.new_task import new_task
from vlm_grpo.cli.plan import plan
from vlm_grpo.cli.predict import predict
from vlm_grpo.cli.report import report
from vlm_grpo.cli.score import score
from vlm_grpo.cli.tasks import tasks
from vlm_grpo.cli.train import train
from vlm_grpo.cli.validate import validate
from vlm_grpo.errors import UserError

app = typer.Typer(
    help="""Fine-tune vision-language models with GRPO on tasks whose answers a rule can check.

    \b
    vlm-grpo train quickstart                      a first run, on any machine, in minutes
    vlm-grpo tasks                                 the tasks and recipes that are installed
    vlm-grpo validate my_task.py --data d.jsonl    check a task and its data, without a model

    The --help of a command has examples. --debug, anywhere, shows the traceback of an error.
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data.app, name="data")
for command in (train, evaluate, predict, report, plan, export, doctor):
    app.command()(command)
for command in (tasks, new_task, validate, score):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _show_version(
    show_version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"vlm-grpo {version('vlm-grpo')}")
        raise typer.Exit


class _CurrentStderr(logging.StreamHandler):
    """A handler that writes to the current ``sys.stderr``.

    A live progress display replaces ``sys.stderr`` and prints log lines above itself.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit: status 0, 2 for a user error, 130 if interrupted.

    Args:
        arguments: command-line arguments; None: ``sys.argv[1:]``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(levelname)s: %(message)s",
        handlers=[_CurrentStderr()],
    )
    try:
        app(args=[word for word in words if word != "--debug"], prog_name="vlm-grpo")
    except (UserError, ValidationError) as error:
        if "--debug" in words:
            traceback.print_exc()
        else:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
