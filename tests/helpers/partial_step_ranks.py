"""One launch for ``test_open_step.py``: FOLDER MODEL NAME ASKED trains, and stops when the run asks
for the n-th time whether to (0: never)."""

from __future__ import annotations

import sys
from pathlib import Path

from small_runs import StopAt, small_run

from vlm_grpo import trainer
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import Stopped
from vlm_grpo.utils.signals import StopRequest


def ranks_run(folder: Path, model: Path, name: str) -> Settings:
    """Three steps of two updates, held to a reference that is two steps old at most."""
    return small_run(
        folder,
        model,
        name=name,
        resume=True,
        objective={"num_iterations": 2, "beta": 0.1, "reference_refresh_every": 2},
        optim={"max_steps": 3},
    )


if __name__ == "__main__":
    place, source, called, asked = sys.argv[1:]
    stop = StopAt(int(asked)) if int(asked) else StopRequest()
    trainer.StopRequest = lambda *_: stop
    try:
        trainer.train(ranks_run(Path(place), Path(source), called))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
