"""Policy + task + examples → scored groups."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from accelerate.utils import gather_object

from vlm_grpo.config.run import DataSettings, Settings
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.distributed.launch import balance_by_cost
from vlm_grpo.engine.sampling import build_sampling_settings
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.grpo.advantages import has_spread
from vlm_grpo.grpo.memory import is_out_of_memory
from vlm_grpo.model.policy import Policy
from vlm_grpo.rewards.scorer import RewardScorer
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example, Group, Prompt

logger = logging.getLogger(__name__)


REPLACEMENTS = 8
"""Examples of the stream that are tried in the place of one that cannot be read."""


@dataclass(frozen=True)
class Loaded:
    """A prompt, the images that were decoded for it, and whether another's place is taken."""

    prompt: Prompt
    decodes: int
    replaces: bool


class PromptLoader:
    """Prompts in the stream's order, those of the next step prepared while this one computes.

    Reading, resizing and cutting an image into patches needs no model; a thread does it ahead of
    time. Decoders and tensor operations release the interpreter's lock.

    Args:
        policy: turns examples into prompts.
        task: asks the question.
        stream: where examples come from.
        skips: an example that has become unreadable is replaced by a later one; otherwise it is
            an error.

    Attributes:
        decodes: image decodes that the prompts taken so far have cost.
        replaced: prompts taken so far that stand in for one that could not be read.
    """

    def __init__(self, policy: Policy, task: Task, stream: ExampleStream, skips: bool) -> None:
        self.policy, self.task, self.stream, self.skips = policy, task, stream, skips
        self.decodes = self.replaced = 0
        self._ahead: dict[int, Future[Loaded]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")

    def take(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at these indices of the stream.

        Raises:
            UserError: an example cannot be read (any more).
        """
        for index in indices:
            self._start(index)
        loaded = [self._ahead.pop(index).result() for index in indices]
        self.decodes += sum(one.decodes for one in loaded)
        self.replaced += sum(one.replaces for one in loaded)
        return [one.prompt for one in loaded]

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin with the prompts that ``take`` is likely to ask for, and drop any others."""
        for index in self._ahead.keys() - set(indices):
            self._ahead.pop(index).cancel()
        for index in indices:
            self._start(index)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _start(self, index: int) -> None:
        if index not in self._ahead:
            self._ahead[index] = self._thread.submit(self._load, index)

    def _load(self, index: int) -> Loaded:
        """The prompt of this index, or of the first one after it that can be read."""
        before, place = self.policy.image_decodes, index
        while True:
            try:
                example = self.policy.with_resized_sizes(self.stream[place])
                prompt = self.policy.build_prompt(example, self.task)
            except UserError as error:
                if not self.skips or place == index + REPLACEMENTS:
                    raise
                logger.warning("%s; another example takes its place", error)
                place += 1
            else:
                return Loaded(prompt, self.policy.image_decodes - before, place > index)


@dataclass(frozen=True)
class Rollout:
    """The groups of one step on this rank.

    Attributes:
        groups: scored groups.
        resampled: groups of all ranks that were drawn in place of some whose rewards were all
            equal.
        rounds: the indices of the stream that this rank sampled together, of replaced groups too.
    """

    groups: tuple[Group, ...]
    resampled: int = 0
    rounds: tuple[tuple[int, ...], ...] = ()


class RolloutSampler:
    """Samples and scores the groups of one step after the other.

    Args:
        policy: what samples.
        task: what asks and scores.
        stream: where examples come from.
        settings: the run's.
        position: how many examples earlier steps have drawn.
        rank: this process's index among ``world`` processes; they share each step's prompts so that
            their tokens are about equal.
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
        skips = settings.data.on_bad_row == "skip"
        self.max_tokens = settings.rollout.max_tokens_per_batch
        self.loader = PromptLoader(policy, task, stream, skips)
        self.judge = RewardScorer(settings.rollout.reward_timeout, settings.rollout.reward_workers)

    def close(self) -> None:
        """End the thread and the processes that work for it."""
        self.loader.close()
        self.judge.close()

    def __call__(self, progress: float) -> Rollout:
        """One step's groups; ``progress`` (0 to 1) is how far the training has come."""
        rollout, wanted = self.settings.rollout, self.settings.optim.prompts_per_step
        groups = self._round(wanted, progress)
        if not rollout.dynamic_sampling:
            return Rollout(tuple(groups.values()), rounds=(tuple(groups),))
        rounds = [tuple(groups)]
        kept, idle = self._sorted_by_spread(groups)
        resampled = 0
        for _ in range(rollout.max_resample or 3):
            missing = wanted - len(kept)
            if not missing:
                break
            fresh = self._round(missing, progress)
            resampled += missing
            kept += self._sorted_by_spread(fresh)[0]
            groups |= fresh
            rounds.append(tuple(fresh))
        chosen = [*kept, *idle[: wanted - len(kept)]]
        own = tuple(groups[index] for index in chosen if index in groups)
        return Rollout(own, resampled, tuple(rounds))

    def _sorted_by_spread(self, groups: Mapping[int, Group]) -> tuple[list[int], list[int]]:
        """The indices of all ranks' groups whose rewards differ, and of those with nothing to
        compare."""
        weights, objective = self.task.reward_weights(), self.settings.objective
        own = [(i, has_spread(group, weights, objective)) for i, group in groups.items()]
        every = sorted(gather_object(own))
        return [i for i, useful in every if useful], [i for i, useful in every if not useful]

    def _round(self, count: int, progress: float) -> dict[int, Group]:
        """This rank's groups of the stream's next ``count`` examples, by index.

        Raises:
            UserError: on all ranks, where one of them could not make its groups.
        """
        start, self.position = self.position, self.position + count
        indices = self._mine(start, count)
        groups, failure = [], None
        try:
            groups = self._groups(indices, progress)
        except UserError as error:
            failure = error
        if any(gather_object([failure is not None])):
            raise failure or UserError("another process could not go on")
        return dict(zip(indices, groups, strict=True))

    def _mine(self, start: int, count: int) -> list[int]:
        """This rank's share of the ``count`` indices from ``start`` on."""
        if self.world == 1:
            return list(range(start, start + count))
        examples = (self.loader.stream[index] for index in range(start, start + count))
        costs = [self.policy.estimate_prompt_tokens(example, self.task) for example in examples]
        return [start + place for place in balance_by_cost(costs, self.world)[self.rank]]

    def _groups(self, indices: list[int], progress: float) -> list[Group]:
        stopwatch = self.policy.stopwatch
        with stopwatch("prompts"):
            prompts = self.loader.take(indices)
        self.loader.prefetch(self._mine(self.position, self.settings.optim.prompts_per_step))
        if not prompts:
            return []
        with stopwatch("rollout"):
            completions = self._sample(prompts, indices)
        task = self.task.at(progress)
        with stopwatch("reward"):
            return score_all(self.judge, task, prompts, completions)

    def _sample(
        self, prompts: Sequence[Prompt], indices: Sequence[int]
    ) -> list[tuple[Completion, ...]]:
        """The prompts' completions; with half of the tokens at once where memory runs out.

        What is sampled stays the same, for it does not depend on what is sampled beside it.
        """
        rollout = self.settings.rollout
        longest = max(len(prompt.token_ids) for prompt in prompts)
        least = longest + rollout.num_generations * rollout.max_completion_length
        while True:
            try:
                return self.policy.sample(
                    prompts,
                    build_sampling_settings(self.policy.distribution, rollout),
                    rollout.num_generations,
                    [(self.settings.seed, index) for index in indices],
                    self.max_tokens,
                )
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.max_tokens <= least:
                    raise UserError(
                        f"out of memory while sampling the {rollout.num_generations} completions "
                        f"of one prompt of {longest} tokens: lower rollout.num_generations, "
                        "rollout.max_completion_length or policy.max_pixels"
                    ) from error
            held = least * len(prompts)  # a larger budget holds no more than all of the prompts
            self.max_tokens = max(min(self.max_tokens, held) // 2, least)
            logger.warning(
                "out of memory: completions are sampled %d tokens at a time from here on; set "
                "rollout.max_tokens_per_batch=%d to start there",
                self.max_tokens,
                self.max_tokens,
            )


def score_all(
    judge: RewardScorer,
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


def drop_unusable_images(
    policy: Policy, examples: Sequence[Example], data: DataSettings
) -> list[Example]:
    """The examples whose images the model's resize can take.

    Raises:
        UserError: there are others, all of which it names, and ``data.on_bad_row`` is not skip;
            or there are only others.
    """
    kept, problems = [], []
    for example in examples:
        try:
            policy.with_resized_sizes(example)
        except ValueError as error:
            problems.append(f"{example.id}: {error}")
        else:
            kept.append(example)
    if problems and (data.on_bad_row == "error" or not kept):
        raise UserError(
            f"{len(problems)} examples have images that the model cannot see:\n"
            f"{bullets(problems)}\ntake them out, or leave them out by data.on_bad_row=skip"
        )
    if problems:
        logger.warning(
            "left out %d examples whose images the model cannot see:\n%s",
            len(problems),
            bullets(problems, 5),
        )
    return kept
