"""The run that several ranks of ``tests/training/checkpoint/test_partial_step.py`` make."""

from __future__ import annotations

import contextlib
from pathlib import Path

from small_runs import StopAt, small_run

from vlm_grpo.config.run import Settings
from vlm_grpo.errors import Stopped
from vlm_grpo.training import trainer
from vlm_grpo.utils.timing import StopRequest


def make_run(folder: Path, model: Path, name: str) -> Settings:
    """Return a run of three steps of two updates, with a reference refreshed every two steps."""
    return small_run(
        folder,
        model,
        name=name,
        resume=True,
        objective={"num_iterations": 2, "beta": 0.1, "reference_refresh_every": 2},
        optim={"max_steps": 3},
    )


def train_on_ranks(folder: Path, model: Path, name: str, count: int) -> None:
    """Train as one rank, and stop at the run's ``count``-th check (0: never)."""
    stop = StopAt(count) if count else StopRequest()
    trainer.StopRequest = lambda *_: stop  # type: ignore[assignment, misc]
    with contextlib.suppress(Stopped):
        trainer.train(make_run(folder, model, name))
