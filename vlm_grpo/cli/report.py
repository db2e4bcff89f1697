"""``vlm-grpo report``: write the HTML report of a run, or a comparison of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlm_grpo.errors import UserError, nearest

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run, or its name in runs/.")
]
OtherRun = Annotated[
    str | None, typer.Argument(metavar="[RUN2]", help="Another run to compare with.")
]


def report(run: RunName, other: OtherRun = None) -> None:
    """Write the report of a run, or one that compares two runs; it opens in any browser.

    \b
    vlm-grpo report counting                  writes runs/counting/report.html
    vlm-grpo report counting counting-lora    writes runs/compare-counting-counting-lora.html
    """
    run_dir = find_run_dir(run)
    other_dir = None if other is None else find_run_dir(other)
    from vlm_grpo.report import build_report, compare_runs

    path = build_report(run_dir) if other_dir is None else compare_runs(run_dir, other_dir)
    typer.echo(f"report in {path}")


def find_run_dir(name: str) -> Path:
    """Return the folder of a run given by its path or by its name in ``runs``.

    Raises:
        UserError: there is no such folder; the message suggests the nearest name.
    """
    from vlm_grpo.config.run import RUNS

    for folder in (Path(name), RUNS / name):
        if folder.is_dir():
            return folder
    known = sorted(path.name for path in RUNS.iterdir() if path.is_dir()) if RUNS.is_dir() else []
    has = f"; {RUNS}/ has {', '.join(known)}" if known else ""
    raise UserError(f"there is no run {name!r}{nearest(name, known)}: give a run's folder{has}")
