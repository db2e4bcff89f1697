"""A finished run, which several tests export, resolve and predict with."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.training.trainer import train


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps of the embedded model, evaluated after each, with another budget."""
    root = tmp_path_factory.mktemp("runs")
    overrides = [
        f"output_dir={root}", "name=run", "optim.max_steps=3", "optim.prompts_per_step=4",
        "optim.warmup_steps=0", "optim.lr=1e-3", "evaluation.every=1", "checkpoint.every=1",
        "data.train_limit=40", "data.eval_limit=40", "policy.lora.r=8", "checkpoint.keep_last=0",
        "policy.max_pixels=3136",
    ]  # fmt: skip
    train(load_settings("counting", overrides))
    return root / "run"
