"""``vlm-grpo report``: the page of a run, or of two runs side by side."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.config.run import RUNS
from vlm_grpo.errors import UserError, nearest

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name in runs/.")
]
OtherRun = Annotated[
    str | None, typer.Argument(metavar="[RUN2]", help="Another run, to compare with.")
]


def report(run: RunName, other: OtherRun = None) -> None:
    """Make the page of a run, or one that compares two runs; it opens in any browser.

    \b
    vlm-grpo report counting                  writes runs/counting/report.html
    vlm-grpo report counting counting-lora    writes runs/compare-counting-counting-lora.html
    """
    folders = [run_folder(name) for name in (run, other) if name is not None]
    # Loaded here because the plotting library takes a second, which no other command should cost.
    pages = importlib.import_module("vlm_grpo.report")
    path = pages.build_report(*folders) if other is None else pages.compare_runs(*folders)
    typer.echo(f"report in {path}")


def run_folder(name: str) -> Path:
    """The folder of a run given by its path or by its name in ``runs``.

    Raises:
        UserError: there is no such folder; the message names what is probably meant.
    """
    for folder in (Path(name), RUNS / name):
        if folder.is_dir():
            return folder
    known = sorted(path.name for path in RUNS.iterdir() if path.is_dir()) if RUNS.is_dir() else []
    has = f"; {RUNS}/ has {', '.join(known)}" if known else ""
    raise UserError(f"there is no run {name!r}{nearest(name, known)}: give a run's folder{has}")
