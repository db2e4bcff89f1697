"""The program ``vlm-grpo``: its commands, its error messages and its exit statuses.

At module level the commands import only what their help texts need. Libraries that are slow to
import (numpy, scipy, torch, transformers) are imported inside the command's function, so that
``vlm-grpo --help`` responds immediately.
"""

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from vlm_grpo.cli.check import check
from vlm_grpo.cli.common import SettingsCommand
from vlm_grpo.cli.doctor import doctor
from vlm_grpo.cli.evaluate import evaluate
from vlm_grpo.cli.export import export
from vlm_grpo.cli.new_task import new_environment, new_task
from vlm_grpo.cli.plan import plan
from vlm_grpo.cli.predict import predict
from vlm_grpo.cli.report import report
from vlm_grpo.cli.sample import sample
from vlm_grpo.cli.serve import serve
from vlm_grpo.cli.settings import settings
from vlm_grpo.cli.tasks import tasks
from vlm_grpo.cli.train import sft, train
from vlm_grpo.errors import UserError, printable, shorten
from vlm_grpo.utils.trust import trust_code

app = typer.Typer(
    help="""Fine-tune vision-language models with GRPO on tasks whose answers a rule can check.

    \b
    vlm-grpo train quickstart                      a first run, on any machine, in minutes
    vlm-grpo tasks                                 the tasks and recipes that are installed
    vlm-grpo settings                              the settings of a run, and what they do
    vlm-grpo check my_task.py --data d.jsonl       check a task and its data, without a model

    The --help of a command has examples. --debug, anywhere, shows the traceback of an error;
    --trust-code runs the Python code that a recipe's, a run's or a benchmark's file names.
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, sft, sample, evaluate, predict, serve, plan):
    app.command(cls=SettingsCommand)(command)
for command in (report, export, doctor, tasks, settings, new_task, new_environment, check):
    app.command()(command)

MOVED = {
    "score": "vlm-grpo evaluate TASK --data DATA --predictions FILE",
    "difficulty": "vlm-grpo sample RECIPE --difficulty FILE",
    "validate": "vlm-grpo check TASK --data DATA",
    "data": "vlm-grpo check TASK --data DATA, which draws rows with --preview FILE",
}
"""The command that replaces each earlier one."""

WAITING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}
"""Settings of GNU's OpenMP library, which reads them when torch loads it."""


@app.callback(invoke_without_command=True)
def _show_version(
    show_version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"vlm-grpo {version('vlm-grpo')}")
        raise typer.Exit


class _CurrentStderr(logging.StreamHandler):
    """A handler of the current ``sys.stderr``: a progress display prints log lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return printable(shorten(super().format(record)))


class _Output(io.FileIO):
    """Standard output or error: a closed pipe (``| head``) or terminal does not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


class _Printable(io.TextIOWrapper):
    """Standard output, of which a terminal obeys no control characters of rows and answers."""

    def write(self, text: str) -> int:
        return super().write(printable(text) if self.isatty() else text)


def _make_safe(stream: Any, wrapper: type[io.TextIOWrapper] = io.TextIOWrapper) -> Any:
    """Return a stream that survives its reader and escapes letters that it cannot encode."""
    raw = _Output(stream.fileno(), "wb", closefd=False)
    return wrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # type: ignore[arg-type]
        stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _wait_awake() -> None:
    """Let idle threads of GNU's OpenMP library, which PyTorch's wheels for Linux bring, check for
    the next kernel 1000 instead of 100 times before they sleep, if there are more threads than
    processors (``perf/README.md``). Other libraries would check without end."""
    is_late = any(name in os.environ for name in (*WAITING, "LD_PRELOAD")) or "torch" in sys.modules
    spec = None if is_late else find_spec("torch")
    if spec is not None and (Path(spec.origin or "").parent / "lib/libgomp.so.1").is_file():
        os.environ.update(WAITING)


def explain(error: Exception) -> str | None:
    """Return the message for an error that the user can fix; None for a bug of the program."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ValidationError):
        return "\n".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return f"a text file is not in UTF-8: {error}"
    if isinstance(error, ImportError) and not (error.name or "").startswith("vlm_grpo"):
        return f"a package is missing or broken: {error}"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit: status 0, 2 for a user error, 130 if interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _wait_awake()
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout = _make_safe(sys.stdout, _Printable)
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _make_safe(sys.stderr)
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[_CurrentStderr()]
    )
    try:
        name = next((word for word in words if not word.startswith("-")), "")
        if name in MOVED:
            raise UserError(f"vlm-grpo {name} has become {MOVED[name]}")
        program = typer.main.get_command(app)
        trust_code("--trust-code" in words)
        options = ("--debug", "--trust-code")
        program(args=[word for word in words if word not in options], prog_name="vlm-grpo")
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        if "--debug" in words:
            traceback.print_exc()
        else:
            print(f"error: {printable(message)}", file=sys.stderr)
        sys.exit(2)
