"""A run folder that the tests of the report share."""

from pathlib import Path

import pytest
from report_runs import make_run


@pytest.fixture(scope="session")
def counting_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a counting run of 20 steps."""
    return make_run(tmp_path_factory.mktemp("runs"), "counting", steps=20)
