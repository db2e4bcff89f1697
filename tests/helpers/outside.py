"""A sampler outside the policy, without a server: a copy of the policy in a thread, and the run
that several ranks of ``tests/training/test_steps_ahead.py`` make with it."""

import copy
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import wait_for
from small_runs import small_run

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.model.policy import Policy
from vlm_grpo.training import rollout, trainer
from vlm_grpo.training.stopping import StopRequest
from vlm_grpo.types import Completion, Prompt


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
            wait_for(lambda: "update" in stopwatch.seconds)
            wait_for(lambda: stopwatch.phase == "rollout")
            stop.signal = signal.SIGINT
            released.wait()

        return Sampler(strategy.policy, hang)

    rollout.VllmSampler = build_sampler  # type: ignore[assignment, misc]
    trainer.StopRequest = lambda *_: stop  # type: ignore[assignment, misc]
    try:
        trainer.train(make_run(folder, model, resume))
    except trainer.Stopped:
        assert not resume


class CopySampler:
    """An outside sampler that generates with a copy of the policy, which gets its weights. It calls
    ``before`` in its thread before each rollout, with the rollout's number from 0."""

    def __init__(self, policy: Policy, before: Callable[[int], None] = lambda number: None) -> None:
        self.policy, self.copy, self.before = policy, copy.deepcopy(policy), before
        self.thread = ThreadPoolExecutor(1)
        self.ready = self.thread.submit(lambda: None)
        self.version, self.rests = -1, 0  # rests: how often nothing was left to sample
        # For each rollout the version of its weights and the ids of its examples.
        self.sampled: list[tuple[int, tuple[str, ...]]] = []

    def publish(self, version: int) -> None:
        weights = {name: w.detach().clone() for name, w in self.policy.model.state_dict().items()}
        self.thread.submit(self._load, version, weights)

    def _load(self, version: int, weights: dict[str, Any]) -> None:
        self.copy.model.load_state_dict(weights)
        self.version = version

    def start(self, *arguments: Any) -> Future[list[tuple[Completion, ...]]]:
        return self.thread.submit(self._sample, *arguments)

    def _sample(
        self, prompts: Sequence[Prompt], sampling: Any, numbers: Any, seeds: Any, begun: Any = ()
    ) -> list[tuple[Completion, ...]]:
        self.before(len(self.sampled))
        self.sampled.append((self.version, tuple(prompt.example.id for prompt in prompts)))
        groups = self.copy.sample(prompts, sampling, numbers, seeds, begun=begun)
        self.copy.engine.clear_image_features()
        return [tuple(replace(c, version=self.version) for c in group) for group in groups]

    def rest(self) -> None:
        self.rests += 1

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
