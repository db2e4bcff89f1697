"""``vlm-grpo report``: write the HTML report of a run, or a comparison of several runs."""

from typing import Annotated

import typer

from vlm_grpo.errors import UserError


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN…", help="Folders of runs, or their names in runs/.")
    ],
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING",
            help="Plot the primary metric against this setting; twice: a line per value of the "
            "second. Without it, three or more runs are plotted against the few settings in which "
            "they differ.",
        ),
    ] = None,
) -> None:
    """Write the report of a run, or one that compares runs; it opens in any browser.

    \b
    vlm-grpo report counting                        writes runs/counting/report.html
    vlm-grpo report counting counting-lora          writes runs/compare-counting-counting-lora.html
    vlm-grpo report --sweep optim.lr lr-1 lr-2 lr-3 plots the primary metric against optim.lr
    """
    from vlm_grpo.config.run import find_run
    from vlm_grpo.report.page import build_report, compare_runs

    folders = [find_run(run) for run in runs]
    if len(folders) == 1 and sweep:
        raise UserError(f"--sweep {sweep[0]} needs several runs: vlm-grpo report RUN RUN…")
    if len(sweep or ()) > 2:
        raise UserError("--sweep takes at most two settings: the axis, and the lines")
    path = build_report(folders[0]) if len(folders) == 1 else compare_runs(folders, sweep or ())
    typer.echo(f"report in {path}")
