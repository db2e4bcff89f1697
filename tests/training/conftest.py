"""Settings of small runs, also with an outside sampler, and double precision for formulas."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from outside import CopySampler
from small_runs import small_run

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.training import rollout as rollout_module


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Any:
    """Return a function that builds the settings of a small run; its arguments change them."""
    return partial(small_run, tmp_path, model_folder)


@pytest.fixture
def vllm(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that builds settings of runs whose samplers are ``CopySampler``: those in
    ``vllm.samplers``. ``vllm.before`` is called before each rollout."""
    monkeypatch.setattr(rollout_module, "POLL_SECONDS", 60.0)  # StopAt counts the looks at it
    server = {"urls": ["http://127.0.0.1:8000"]}

    def build(ahead: int = 0, **changes: Any) -> Settings:
        rollout = {"sampler": "vllm", "vllm": server, "steps_ahead": ahead}
        return settings(rollout=rollout | changes.pop("rollout", {}), **changes)

    def build_copy(strategy: Strategy, settings: Settings) -> CopySampler:
        build.samplers.append(CopySampler(strategy.policy, lambda number: build.before(number)))
        return build.samplers[-1]

    build.before, build.samplers = lambda number: None, []
    monkeypatch.setattr(rollout_module, "VllmSampler", build_copy)
    return build


@pytest.fixture
def float64() -> Iterator[None]:
    """Create tensors in float64 unless a test names another dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
