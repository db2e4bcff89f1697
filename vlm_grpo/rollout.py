"""Policy + task + examples → scored groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vlm_grpo.config import Settings
from vlm_grpo.credit import has_spread
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.judge import Judge
from vlm_grpo.policy import Policy, sampling_of
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example, Group, Prompt


class PromptLoader:
    """Prompts in the stream's order, those of the next step prepared while this one computes.

    Reading, resizing and cutting an image into patches needs no model; a thread does it ahead of
    time. Decoders and tensor operations release the interpreter's lock.

    Args:
        policy: turns examples into prompts.
        task: asks the question.
        stream: where examples come from.

    Attributes:
        decodes: image decodes that the prompts taken so far have cost.
    """

    def __init__(self, policy: Policy, task: Task, stream: ExampleStream) -> None:
        self.policy, self.task, self.stream = policy, task, stream
        self.decodes = 0
        self._ahead: dict[int, Future[tuple[Prompt, int]]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")

    def take(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these indices of the stream."""
        for index in indices:
            self._start(index)
        loaded = [self._ahead.pop(index).result() for index in indices]
        self.decodes += sum(decodes for _, decodes in loaded)
        return [prompt for prompt, _ in loaded]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin with prompts that ``take`` is likely to ask for."""
        for index in indices:
            self._start(index)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _start(self, index: int) -> None:
        if index not in self._ahead:
            self._ahead[index] = self._thread.submit(self._load, index)

    def _load(self, index: int) -> tuple[Prompt, int]:
        """The prompt and the number of images that were decoded for it."""
        before = self.policy.image_decodes
        prompt = self.policy.prompt(self.policy.with_seen_sizes(self.stream[index]), self.task)
        return prompt, self.policy.image_decodes - before


@dataclass(frozen=True)
class Rollout:
    """The groups of one step on this rank.

    Attributes:
        groups: scored groups.
        resampled: groups that were replaced because their rewards were all equal.
    """

    groups: tuple[Group, ...]
    resampled: int = 0


class Roller:
    """Samples and scores the groups of one step after the other.

    Args:
        policy: what samples.
        task: what asks and scores.
        stream: where examples come from.
        settings: the run's.
        position: how many examples earlier steps have drawn.
        rank: this process's index among ``world`` processes; each takes every world-th prompt.
        world: number of processes.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        stream: ExampleStream,
        settings: Settings,
        position: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.policy, self.task, self.settings = policy, task, settings
        self.position, self.rank, self.world = position, rank, world
        self.loader = PromptLoader(policy, task, stream)
        self.judge = Judge(settings.rollout.reward_timeout, settings.rollout.reward_workers)

    def close(self) -> None:
        """End the thread and the processes that work for it."""
        self.loader.close()
        self.judge.close()

    def __call__(self, progress: float) -> Rollout:
        """One step's groups; ``progress`` (0 to 1) is how far the training has come."""
        rollout = self.settings.rollout
        wanted = self._mine(self.settings.optim.prompts_per_step)
        groups = self._groups(wanted, progress)
        if not rollout.dynamic_sampling:
            return Rollout(tuple(groups))
        kept, idle = self._sorted_by_spread(groups)
        resampled = 0
        for _ in range(rollout.max_resample or 3):
            if not idle:
                break
            fresh = self._groups(self._mine(len(idle) * self.world), progress)
            resampled += len(fresh)
            kept += self._sorted_by_spread(fresh)[0]
            idle = idle[: len(wanted) - len(kept)]
        return Rollout((*kept, *idle), resampled)

    def _sorted_by_spread(self, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """The groups whose rewards differ, and those that have nothing to compare."""
        weights, kept, idle = self.task.reward_weights(), [], []
        for group in groups:
            useful = has_spread(group, weights, self.settings.objective)
            (kept if useful else idle).append(group)
        return kept, idle

    def _mine(self, count: int) -> list[int]:
        """This rank's share of the next ``count`` indices of the stream."""
        start, self.position = self.position, self.position + count
        return list(range(start + self.rank, self.position, self.world))

    def _groups(self, indices: list[int], progress: float) -> list[Group]:
        rollout = self.settings.rollout
        stopwatch = self.policy.stopwatch
        with stopwatch("prompts"):
            prompts = self.loader.take(indices)
        ahead = range(self.position, self.position + self.settings.optim.prompts_per_step)
        self.loader.prefetch(ahead[self.rank :: self.world])
        with stopwatch("rollout"):
            completions = self.policy.sample(
                prompts,
                sampling_of(self.policy.restriction, rollout),
                rollout.num_generations,
                [(self.settings.seed, index) for index in indices],
                rollout.max_tokens_per_batch,
            )
        task = self.task.at(progress)
        with stopwatch("reward"):
            return score_all(self.judge, task, prompts, completions)


def score_all(
    judge: Judge,
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[tuple[Completion, ...]],
) -> list[Group]:
    """The groups of prompts and their completions, each completion scored."""
    pairs = list(zip(prompts, completions, strict=True))
    texts = [completion.text for _, members in pairs for completion in members]
    examples = [prompt.example for prompt, members in pairs for _ in members]
    tokens = [len(completion.token_ids) for _, members in pairs for completion in members]
    scores = iter(judge(task, texts, examples, tokens))
    return [
        Group(prompt, members, tuple(itertools.islice(scores, len(members))))
        for prompt, members in pairs
    ]


def refuse_unseeable(policy: Policy, examples: Sequence[Example]) -> None:
    """Find every image that the model's resize cannot take, before the first step.

    Raises:
        UserError: with all of them.
    """
    problems = []
    for example in examples:
        try:
            policy.with_seen_sizes(example)
        except ValueError as error:
            problems.append(f"{example.id}: {error}")
    if problems:
        raise UserError(
            f"{len(problems)} examples have images that the model cannot see; take them out:\n"
            f"{bullets(problems)}"
        )
