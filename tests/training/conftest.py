"""Settings of small runs for the parts of a step, and double precision for formulas."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_run


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Any:
    """Return a function that builds the settings of a small run; its arguments change them."""
    return partial(small_run, tmp_path, model_folder)


@pytest.fixture
def float64() -> Iterator[None]:
    """Create tensors in float64 unless a test names another dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
