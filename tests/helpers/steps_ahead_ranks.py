"""The run that several ranks of ``tests/training/test_steps_ahead.py`` make."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from outside import CopySampler
from small_runs import small_run

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.training import rollout, trainer
from vlm_grpo.utils.timing import StopRequest


def make_run(folder: Path, model: Path, resume: bool) -> Settings:
    """Return a run of four steps whose completions are generated one step ahead."""
    ahead = {"sampler": "vllm", "vllm": {"urls": ["http://127.0.0.1:8000"]}, "steps_ahead": 1}
    return small_run(folder, model, resume=resume, rollout=ahead)


def train_on_ranks(folder: Path, model: Path, resume: bool) -> None:
    """Train as one rank. A new run is stopped while rank 0 waits for its second rollout."""
    stop, released = StopRequest(), threading.Event()

    class Sampler(CopySampler):
        def close(self) -> None:
            released.set()
            super().close()

    def build_sampler(strategy: Strategy, settings: Settings) -> Sampler:
        stopwatch = strategy.policy.stopwatch

        def hang(number: int) -> None:
            if number != 1 or resume or not strategy.accelerator.is_main_process:
                return
            for reached in (
                lambda: "update" in stopwatch.seconds,
                lambda: stopwatch.phase == "rollout",
            ):
                while not reached():
                    time.sleep(0.001)
            stop.signal = signal.SIGINT
            released.wait()

        return Sampler(strategy.policy, hang)

    rollout.VllmSampler = build_sampler  # type: ignore[assignment, misc]
    trainer.StopRequest = lambda *_: stop  # type: ignore[assignment, misc]
    try:
        trainer.train(make_run(folder, model, resume))
    except trainer.Stopped:
        assert not resume
