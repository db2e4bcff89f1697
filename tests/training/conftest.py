"""Settings of small runs for the parts of a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_runs import small_run


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Any:
    """Return a function that builds the settings of a small run; its arguments change them."""
    return partial(small_run, tmp_path, model_folder)
