"""Train on several ranks: FOLDER MODEL NAME COUNT stops at the run's COUNT-th check (0: never)."""

from __future__ import annotations

import sys
from pathlib import Path

from small_runs import StopAt, small_run

from vlm_grpo import trainer
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import Stopped
from vlm_grpo.utils.signals import StopRequest


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


if __name__ == "__main__":
    folder, model, name, count = sys.argv[1:]
    stop = StopAt(int(count)) if int(count) else StopRequest()
    trainer.StopRequest = lambda *_: stop
    try:
        trainer.train(make_run(Path(folder), Path(model), name))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
