"""A sampler outside the policy, without a server: a copy of the policy in a thread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Completion, Prompt


class CopySampler:
    """An outside sampler that generates with a copy of the policy, which gets its weights.

    Args:
        policy: the policy.
        before: called in the thread before each rollout, with its number from 0.

    Attributes:
        sampled: for each rollout the version of its weights and the ids of its examples.
        rests: how often it was told that nothing is left to sample.
    """

    def __init__(self, policy: Policy, before: Callable[[int], None] = lambda number: None) -> None:
        self.policy, self.copy, self.before = policy, copy.deepcopy(policy), before
        self.thread = ThreadPoolExecutor(1)
        self.ready = self.thread.submit(lambda: None)
        self.version, self.rests = -1, 0
        self.sampled: list[tuple[int, tuple[str, ...]]] = []

    def publish(self, version: int) -> None:
        weights = {name: w.detach().clone() for name, w in self.policy.model.state_dict().items()}
        self.thread.submit(self._load, version, weights)

    def _load(self, version: int, weights: dict[str, Any]) -> None:
        self.copy.model.load_state_dict(weights)
        self.version = version

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        num_generations: Sequence[range],
        seeds: Sequence[Sequence[int | str]],
    ) -> Future[list[tuple[Completion, ...]]]:
        return self.thread.submit(self._sample, prompts, sampling, num_generations, seeds)

    def _sample(self, prompts: Sequence[Prompt], *arguments: Any) -> list[tuple[Completion, ...]]:
        self.before(len(self.sampled))
        self.sampled.append((self.version, tuple(prompt.example.id for prompt in prompts)))
        groups = self.copy.sample(prompts, *arguments)
        self.copy.engine.clear_image_features()
        return [tuple(replace(c, version=self.version) for c in group) for group in groups]

    def rest(self) -> None:
        self.rests += 1

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
