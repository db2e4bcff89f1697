"""Small runs that sample with servers that stand in for vLLM's."""

from pathlib import Path
from typing import Any

import pytest
from fake_vllm import write_python
from small_runs import small_run

from vlm_grpo.serve import sampler, server


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """The folder of the servers that a run starts: their plan and what they were asked."""
    return tmp_path / "fake"


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path, fake: Path, monkeypatch: Any) -> Any:
    """Return a function that builds the settings of a small run; ``plan`` is its servers'."""
    for module in (server, sampler):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)

    def build(plan: Any = None, urls: Any = (), vllm: Any = None, **changes: Any) -> Any:
        servers = {"urls": urls} if urls else {"python": str(write_python(fake, **(plan or {})))}
        rollout = {"sampler": "vllm", "vllm": {**servers, **(vllm or {})}}
        rollout |= changes.pop("rollout", {})
        objective = {"sampler_correction": "token", **changes.pop("objective", {})}
        return small_run(tmp_path, model_folder, rollout=rollout, objective=objective, **changes)

    return build
