"""Run folders and a browser that the tests of the report share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, open_browser
from report_runs import TASKS, make_run

from vlm_grpo.report.page import build_report


@pytest.fixture(scope="session")
def counting_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a counting run of 20 steps."""
    return make_run(tmp_path_factory.mktemp("runs"), "counting", steps=20)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser window of 1300 by 1000 pixels."""
    with open_browser() as started:
        yield started


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a page of each task, and with a second grounding run."""
    folder = tmp_path_factory.mktemp("runs")
    for task in TASKS:
        build_report(make_run(folder, task, steps=20, held_out=8))
    make_run(folder, "grounding", steps=20, held_out=8, seed=1, skill=(0.2, 0.5))
    return folder
