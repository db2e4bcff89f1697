"""A plan of the counting recipe on a small device."""

from __future__ import annotations

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.planning.devices import GIB, Device
from vlm_grpo.planning.planner import Planner


@pytest.fixture(scope="module")
def planner() -> Planner:
    settings = load_settings("counting", ["data.train_limit=30"])
    return Planner(settings, Device("toy", GIB // 2, is_cpu=True))
