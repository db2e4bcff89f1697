"""The rollout: the sampling and scoring of completions for a step's prompts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator

from vlm_grpo.config.run import Settings
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.distributed.collectives import (
    any_rank,
    balance_by_cost,
    gather_object,
    sum_over_ranks,
)
from vlm_grpo.engine.sampling import build_sampling_settings
from vlm_grpo.errors import UserError
from vlm_grpo.grpo.advantages import has_spread
from vlm_grpo.grpo.balance import balance_groups, estimate_cost
from vlm_grpo.grpo.memory import TokenBudget, is_out_of_memory
from vlm_grpo.grpo.prompt_loader import PromptLoader
from vlm_grpo.model.policy import Policy
from vlm_grpo.rewards.failures import FailureGuard
from vlm_grpo.rewards.scorer import RewardScorer, build_scorer
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example, Group, Prompt


@dataclass(frozen=True)
class Rollout:
    """The groups of one step on this rank.

    Attributes:
        groups: the scored groups.
        resampled: number of groups, over all ranks, that were sampled to replace groups whose
            rewards were all equal.
        rounds: for each round of sampling, the stream's indices that this rank sampled, including
            indices of replaced groups; then those of the groups that it got from other ranks.
    """

    groups: tuple[Group, ...]
    resampled: int = 0
    rounds: tuple[tuple[int, ...], ...] = ()
    num_tokens: int = 0


class RolloutSampler:
    """A sampler of the groups of each step, which also scores them.

    The prompts of a step are distributed over the ranks so that each has about the same number of
    tokens; groups are moved after sampling so that this holds for the update too.

    Args:
        policy: samples the completions.
        task: writes the questions and scores the answers.
        examples: the training examples, at least one.
        settings: the run's settings.
        accelerator: the ranks.

    Attributes:
        position: number of examples that earlier steps took from the stream.
        budget: maximum number of tokens sampled at once.
        num_tokens: number of tokens sampled in the current step.
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        examples: Sequence[Example],
        settings: Settings,
        accelerator: Accelerator,
    ) -> None:
        self.policy, self.task, self.settings = policy, task, settings
        self.accelerator, self.world_size = accelerator, accelerator.num_processes
        self.position, self.num_tokens = 0, 0
        max_tokens = settings.rollout.max_tokens_per_batch
        self.budget = TokenBudget(max_tokens, "rollout.max_tokens_per_batch")
        self.stream = ExampleStream(examples, settings.seed)
        skip, workers = settings.data.on_bad_row == "skip", settings.data.dataloader_num_workers
        self.loader = PromptLoader(policy, task, self.stream, skip, workers)
        self.failures = FailureGuard()
        self.scorer = build_scorer(settings, accelerator.process_index)

    def close(self) -> None:
        """Stop the loader's threads and processes, and the scorer's."""
        self.loader.close()
        self.scorer.close()

    def sample(self, progress: float) -> Rollout:
        """Sample and score the groups of one step.

        Args:
            progress: fraction of the training steps done, 0 to 1.

        Raises:
            UserError: on all ranks, if one of them could not make its groups, or if a reward failed
                on every completion. ``position`` is unchanged then.
        """
        position, self.num_tokens = self.position, 0
        try:
            return replace(self._sample_step(progress), num_tokens=self.num_tokens)
        except UserError:
            self.position = position
            raise

    def _sample_step(self, progress: float) -> Rollout:
        rollout, wanted = self.settings.rollout, self.settings.optim.prompts_per_step
        groups = self._sample_round(wanted, progress)
        rounds = [tuple(groups)]
        if not rollout.dynamic_sampling:
            return self._balance(groups, 0, rounds)
        kept, uniform = self._split_by_spread(groups)
        resampled = 0
        for _ in range(rollout.max_resample or 3):
            missing = wanted - len(kept)
            if not missing:
                break
            fresh = self._sample_round(missing, progress)
            resampled += missing
            kept += self._split_by_spread(fresh)[0]
            groups |= fresh
            rounds.append(tuple(fresh))
        chosen = [*kept, *uniform[: wanted - len(kept)]]
        own = {index: groups[index] for index in chosen if index in groups}
        return self._balance(own, resampled, rounds)

    def _balance(
        self, groups: Mapping[int, Group], resampled: int, rounds: Sequence[tuple[int, ...]]
    ) -> Rollout:
        """Return the rollout with its groups moved between the ranks."""
        weights, shared = self.task.reward_weights(), self.policy.shared
        costs = {
            index: estimate_cost(group, weights, self.settings, shared)
            for index, group in groups.items()
        }
        own, received = balance_groups(groups, costs, self._load_encoded, self.accelerator)
        moved = (received,) if received else ()
        return Rollout(tuple(own.values()), resampled, (*rounds, *moved))

    def _load_encoded(self, indices: Sequence[int]) -> list[Prompt]:
        prompts = self.loader.load(indices)
        self.policy.encode_images(prompts)
        return prompts

    def _split_by_spread(self, groups: Mapping[int, Group]) -> tuple[list[int], list[int]]:
        """Return the indices of all ranks' groups: those with different rewards, and the others."""
        weights, objective = self.task.reward_weights(), self.settings.objective
        own = [(i, has_spread(group, weights, objective)) for i, group in groups.items()]
        every = sorted(gather_object(own))
        return [i for i, useful in every if useful], [i for i, useful in every if not useful]

    def _sample_round(self, count: int, progress: float) -> dict[int, Group]:
        """Sample this rank's groups of the stream's next ``count`` examples; return them by index.

        Raises:
            UserError: as for ``sample``.
        """
        start, self.position = self.position, self.position + count
        indices = self._own_indices(start, count)
        groups, failure = [], None
        try:
            groups = self._make_groups(indices, progress)
        except UserError as error:
            failure = error
        if any_rank(self.accelerator, failure is not None):
            raise failure or UserError("another process of this run could not make its groups")
        self._check_rewards(groups)
        self._check_form(groups)
        return dict(zip(indices, groups, strict=True))

    def _check_form(self, groups: Sequence[Group]) -> None:
        """Check the shared form on all ranks if one of them has a much larger group than before."""
        policy, check = self.policy, self.policy.form_check
        if check is None:
            return
        is_larger = policy.shared and check.is_larger(groups)
        if any_rank(self.accelerator, is_larger or not policy.shared):
            if policy.shared:
                check.check(policy, groups)
            if any_rank(self.accelerator, not policy.shared) and policy.shared:
                policy.repeat_prompts()

    def _check_rewards(self, groups: Sequence[Group]) -> None:
        """Raise ``UserError`` on all ranks if a reward fails on every completion of all ranks."""
        scores = [score for group in groups for score in group.scores]
        examples = [group.prompt.example for group in groups for _ in group.scores]
        self.failures.check(self.task, scores, examples, self._add_ranks)

    def _add_ranks(self, numbers: list[int]) -> list[int]:
        sums = torch.tensor(numbers, device=self.accelerator.device)
        sum_over_ranks(self.accelerator, [sums])
        return sums.tolist()

    def _own_indices(self, start: int, count: int) -> list[int]:
        """Return this rank's share of ``count`` indices from ``start``."""
        if self.world_size == 1:
            return list(range(start, start + count))
        examples = (self.stream[index] for index in range(start, start + count))
        costs = [self.policy.prompts.estimate_tokens(example, self.task) for example in examples]
        shares = balance_by_cost(costs, self.world_size)
        return [start + place for place in shares[self.accelerator.process_index]]

    def _make_groups(self, indices: list[int], progress: float) -> list[Group]:
        stopwatch = self.policy.stopwatch
        with stopwatch("prompts"):
            prompts = self.loader.load(indices)
        self.loader.prefetch(self._own_indices(self.position, self.settings.optim.prompts_per_step))
        if not prompts:
            return []
        with stopwatch("rollout"):
            completions = self._sample_completions(prompts, indices)
        self.num_tokens += sum(len(c.token_ids) for members in completions for c in members)
        with stopwatch("reward"):
            return score_groups(self.scorer, self.task.at(progress), prompts, completions)

    def _sample_completions(
        self, prompts: Sequence[Prompt], indices: Sequence[int]
    ) -> list[tuple[Completion, ...]]:
        """Sample the prompts' completions, and halve the token budget if memory runs out.

        The completions do not depend on the budget.
        """
        rollout = self.settings.rollout
        longest = max(len(prompt.token_ids) for prompt in prompts)
        minimum = longest + rollout.num_generations * rollout.max_completion_length
        sampling = build_sampling_settings(self.policy.distribution, rollout)
        seeds = [(self.settings.seed, index) for index in indices]
        while True:
            try:
                return self.policy.sample(
                    prompts, sampling, rollout.num_generations, seeds, self.budget.tokens
                )
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.budget.limit <= minimum:
                    raise UserError(
                        f"out of memory while sampling the {rollout.num_generations} completions "
                        f"of one prompt of {longest} tokens: lower rollout.num_generations, "
                        "rollout.max_completion_length or policy.max_pixels"
                    ) from error
            self.budget.halve(minimum * len(prompts), minimum)


def score_groups(
    scorer: RewardScorer,
    task: Task,
    prompts: Sequence[Prompt],
    completions: Sequence[tuple[Completion, ...]],
) -> list[Group]:
    """Score the completions of each prompt."""
    pairs = list(zip(prompts, completions, strict=True))
    texts = [completion.text for _, members in pairs for completion in members]
    examples = [prompt.example for prompt, members in pairs for _ in members]
    lengths = [len(completion.token_ids) for _, members in pairs for completion in members]
    numbers = [number for number, (_, members) in enumerate(pairs) for _ in members]
    scores = iter(scorer(task, texts, examples, lengths, numbers))
    return [
        Group(prompt, members, tuple(itertools.islice(scores, len(members))))
        for prompt, members in pairs
    ]
