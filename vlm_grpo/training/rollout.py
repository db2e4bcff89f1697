"""The rollout: the sampling and scoring of completions for a step's prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import build_scorer
from vlm_grpo.data.prompt_order import ExampleStream, StreamCursor
from vlm_grpo.dist.balance import balance_by_cost, balance_groups
from vlm_grpo.dist.collectives import any_rank, fail_together, gather_object
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.sampling import SamplingSettings, build_sampling_settings
from vlm_grpo.model.episodes import Seeds, sample_episodes, sample_next_turns
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve.sampler import VllmSampler
from vlm_grpo.task import Task
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.task.scorer import FailureGuard
from vlm_grpo.training.methods import Groups, Method, overrides
from vlm_grpo.training.out_of_memory import TokenBudget, is_out_of_memory
from vlm_grpo.training.prompt_loader import PromptLoader
from vlm_grpo.training.step_batch import Rollout, estimate_cost, has_spread, score_groups
from vlm_grpo.training.stopping import StepInterrupted, StopRequest
from vlm_grpo.types import Completion, Example, Group, Prompt

POLL_SECONDS = 0.1
"""Time between two looks at the request to stop."""

Completions = list[tuple[Completion, ...]]
SamplingArguments = tuple[list[Prompt], SamplingSettings, list[range], list[tuple[int, int]]]
"""The first arguments of ``Policy.sample``."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class PendingRollout:
    """A round of sampling that has begun, perhaps in the background."""

    indices: Sequence[int]  # the stream's indices that all ranks sample
    own: list[int]  # those that this rank samples
    prompts: list[Prompt]  # the prompts of ``own``
    completions: Future[Completions] | None = None  # None: the policy samples them
    began: float = field(default_factory=time.perf_counter)
    ended: list[float] = field(default_factory=list)  # when the completions were there

    def __post_init__(self) -> None:
        if self.completions is not None:
            self.completions.add_done_callback(lambda _: self.ended.append(time.perf_counter()))


def wait_for(future: Future[Result], stop_request: StopRequest) -> Result:
    """Wait for the result of a future; a requested stop raises ``StepInterrupted``."""
    while not wait([future], POLL_SECONDS).done:
        stop_request.check()
    return future.result()


class RolloutSampler:
    """A sampler of the groups of each step, which also scores them.

    The prompts of a step are distributed over the ranks so that each has about the same number of
    tokens; groups are moved after sampling so that this holds for the update too. An outside
    sampler, which is built at once or after steps whose completions are written, generates the
    completions of up to ``rollout.steps_ahead`` later steps in the background. Everything else,
    with all communication, happens in the main thread.
    """

    def __init__(
        self,
        strategy: Strategy,
        task: Task,
        stream: ExampleStream,
        settings: Settings,
        methods: Mapping[str, Method] = MappingProxyType({}),
    ) -> None:
        self.strategy, self.policy = strategy, strategy.policy
        self.outside: VllmSampler | None = None
        self.task, self.stream, self.settings = task, stream, settings
        self.methods = tuple(methods.values())
        self._choice = self._find("choose")
        self._author, self._varying = self._find("write"), self._find("variant")
        self._reviser = self._find("revise")
        size = settings.rollout.num_generations
        self._refused = max((method.count_refused(size) for method in self.methods), default=0)
        self.accelerator = strategy.accelerator
        self.cursor, self.num_tokens = StreamCursor(), 0  # tokens sampled in the current step
        self._pending: deque[PendingRollout] = deque()
        self._last_end, self._stop_request, self._is_ready = 0.0, StopRequest(), False
        max_tokens = settings.rollout.max_tokens_per_batch
        self.budget = TokenBudget(max_tokens, "rollout.max_tokens_per_batch")
        skip, threads = settings.data.on_bad_row == "skip", settings.data.dataloader_num_workers
        self.runner = EnvironmentRunner(settings.rollout.reward_workers)
        self._episodes = ThreadPoolExecutor(1, "episodes")  # of an outside sampler
        self.loader = PromptLoader(self.policy, task, stream, skip, max(1, threads), self.runner)
        self.failures = FailureGuard()
        self.scorer = build_scorer(settings, self.accelerator.process_index)
        if self._author_of(0) is None:
            self.start_outside()

    def _find(self, hook: str) -> Method:
        """Return the method that has the hook, or else a method whose hooks do nothing."""
        return next((method for method in self.methods if overrides(method, hook)), Method(None))

    def close(self) -> None:
        if self.outside is not None:
            self.outside.close()
        self.loader.close()
        self.scorer.close()
        self.runner.close()
        self._episodes.shutdown(wait=False, cancel_futures=True)

    @property
    def unused(self) -> list[int]:
        """The indices that were taken from the stream and that no step has used."""
        started = [index for begun in self._pending for index in begun.indices]
        return [*started, *self.cursor.returned]

    def restore(self, position: int, unused: Sequence[int]) -> None:
        """Restore the place in the stream, and drop the rounds that have begun."""
        self.cursor = StreamCursor(position, unused)
        self._pending.clear()

    def sample(self, step: int, stop_request: StopRequest | None = None) -> Rollout:
        """Sample and score the groups of the step after ``step`` finished ones.

        If that fails or is stopped on one rank, all ranks raise, and the place in the stream is
        unchanged.
        """
        place, self.num_tokens = (self.cursor.position, self.unused), 0
        self._stop_request = stop_request or StopRequest()
        try:
            if (author := self._author_of(step)) is not None:
                return self._write_step(step, author)
            outside = self.start_outside()
            if outside is not None:
                self._publish(outside, step)
            with nullcontext() if outside else self.strategy.gathered():
                rollout = replace(self._sample_step(step), step=step, num_tokens=self.num_tokens)
            if outside is not None and not self._pending:
                outside.rest()
            return rollout
        except (UserError, StepInterrupted):
            self.restore(*place)
            raise

    def start_outside(self) -> VllmSampler | None:
        """Return the outside sampler, built the first time; None if the policy samples."""
        if self.outside is None and self.settings.rollout.sampler == "vllm":
            self.outside = VllmSampler(self.strategy, self.settings)
        return self.outside

    def _author_of(self, step: int) -> Method | None:
        """Return the method that writes the completions of a step; None: they are sampled."""
        return self._author if self._author.writes(step) else None

    def _write_step(self, step: int, author: Method) -> Rollout:
        groups = []
        with self.strategy.gathered():
            with self._fail_together():
                begun = self._begin_round(self.settings.optim.prompts_per_step, step)
                groups = author.write(begun.prompts, self.task)
                self.policy.check_sharing(begun.prompts)
                self._encode_images(begun.prompts)
            self._check_sharing(groups)
        return Rollout(tuple(groups), step=step, author=author.name)

    def _sample_step(self, step: int) -> Rollout:
        rollout, optim = self.settings.rollout, self.settings.optim
        wanted = optim.prompts_per_step
        task = self.task.with_progress(self.settings.progress_at(step))
        ahead = max(0, min(rollout.steps_ahead, optim.max_steps - 1 - step))
        groups = self._sample_round(lambda: self._begin_step(ahead, step), task)
        recalls = any(overrides(method, "recall") for method in self.methods)
        if not (rollout.dynamic_sampling or recalls):
            return self._learn(task, groups, self._balance(step, task, groups, 0))
        kept, uniform = self._split_by_spread(groups, task)
        resampled = 0
        for _ in range((rollout.max_resample or 3) if rollout.dynamic_sampling else 0):
            missing = wanted - len(kept)
            if not missing:
                break
            fresh = self._sample_round(lambda count=missing: self._begin_round(count, step), task)
            resampled += missing
            kept += self._split_by_spread(fresh, task)[0]
            groups |= fresh
        chosen = [*kept, *uniform[: wanted - len(kept)]]
        own = {index: groups[index] for index in chosen if index in groups}
        balanced = self._balance(step, task, own, resampled)
        return self._learn(task, groups, balanced, wanted - len(kept))

    def _learn(self, task: Task, groups: Groups, rollout: Rollout, missing: int = 0) -> Rollout:
        """Let the methods learn from a step, and return it with the groups that they recall: at
        most ``missing`` over all ranks. If one rank fails, no method has learned.
        """
        step, ranks, count = rollout.step, self.accelerator, self.settings.optim.mini_batches
        recalled = {method.name: method.recall(missing, step) for method in self.methods}
        every = [group for kept in recalled.values() for group in kept]
        own = every[ranks.process_index :: ranks.num_processes]
        learners = [method for method in self.methods if overrides(method, "observe")]
        prompts, observed = list[Prompt](), dict[str, list[Any]]()
        if learners or every:
            with fail_together(ranks):
                prompts = self.load_prompts([group.index for group in own])
                observed = {m.name: m.observe(step, task, groups) for m in learners}
        metrics: dict[str, float] = {}
        for method in self.methods:
            found = gather_object(observed[method.name]) if method.name in observed else []
            metrics |= method.learn(step, found, recalled[method.name])
        pairs = zip(prompts, own, strict=True)
        places = range(ranks.process_index, len(every), ranks.num_processes)
        numbers = (*rollout.mini_batches, *(place % count for place in places))
        again = tuple(Group(p, kept.completions, kept.scores) for p, kept in pairs)
        return replace(rollout, recalled=again, mini_batches=numbers, metrics=metrics)

    def _balance(self, step: int, task: Task, groups: Groups, resampled: int) -> Rollout:
        weights, settings, shared = task.reward_weights(), self.settings, self.policy.shared
        costs = {i: estimate_cost(group, weights, settings, shared) for i, group in groups.items()}
        count, ranks = settings.optim.mini_batches, self.accelerator
        own, parts = balance_groups(groups, costs, self.load_prompts, ranks, count)
        numbers = tuple(parts[index] for index in own)
        return Rollout(tuple(own.values()), weights, resampled, step=step, mini_batches=numbers)

    def load_prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """Load prompts, and encode their images as the policy does when it samples them."""
        prompts = self.loader.load(indices)
        self._encode_images(prompts)
        return prompts

    def _encode_images(self, prompts: Sequence[Prompt]) -> None:
        if self.settings.rollout.sampler == "policy":
            self.policy.encode_images(prompts)

    def _split_by_spread(self, groups: Groups, task: Task) -> tuple[list[int], list[int]]:
        """Return the indices of all ranks' groups: those with different rewards, and the others."""
        weights, objective = task.reward_weights(), self.settings.objective
        own = [(i, has_spread(group, weights, objective)) for i, group in groups.items()]
        every = sorted(gather_object(own))
        return [i for i, useful in every if useful], [i for i, useful in every if not useful]

    def _sample_round(self, begin: Callable[[], PendingRollout], task: Task) -> dict[int, Group]:
        """Finish this rank's part of the round that ``begin`` returns; its groups by index."""
        own, groups = [], []
        with self._fail_together():
            begun = begin()
            own, groups = begun.own, self._make_groups(begun, task)
            self._stop_request.check()
        scores = [score for group in groups for score in group.scores]
        examples = [group.prompt.example for group in groups for _ in group.scores]
        self.failures.check(task, scores, examples, self._add_ranks)
        self._check_sharing(groups)
        return dict(zip(own, groups, strict=True))

    @contextmanager
    def _fail_together(self) -> Iterator[None]:
        """Raise ``UserError`` or ``StepInterrupted`` on all ranks if the block does on one."""
        failure = None
        try:
            yield
        except (UserError, StepInterrupted) as error:
            failure = error
        flags = [isinstance(failure, StepInterrupted), isinstance(failure, UserError)]
        stopped, failed = self._add_ranks([int(flag) for flag in flags])
        if stopped:
            raise StepInterrupted
        if failed:
            raise failure or UserError("another process of this run could not make its groups")

    def _publish(self, outside: VllmSampler, step: int) -> None:
        """Give the outside sampler the current weights, the first time when it is ready."""
        with self.policy.stopwatch("publish"):
            if not self._is_ready:  # a server takes minutes to start
                with self._fail_together():
                    wait_for(outside.ready, self._stop_request)
                self._is_ready = True
            outside.publish(step)

    def _begin_step(self, ahead: int, step: int) -> PendingRollout:
        """Begin the first rounds of this step and the next ``ahead`` ones; return this step's."""
        count = self.settings.optim.prompts_per_step
        while (begun := len(self._pending)) <= ahead:
            self._pending.append(self._begin_round(count, step + begun))
        return self._pending.popleft()

    def _begin_round(self, count: int, step: int) -> PendingRollout:
        """Load this rank's prompts of a step's next ``count`` examples, and start sampling."""
        choice = self._choice if self._author_of(step) is None else None
        indices = self.cursor.take(count, choice)
        own = self._own_indices(indices)
        now, then = map(self._varying.variant, (step, step + 1))
        with self.policy.stopwatch("prompts"):
            prompts = self.loader.load(own, now)
        following = self.cursor.peek(self.settings.optim.prompts_per_step, choice)
        self.loader.prefetch(self._own_indices(following), then)
        if self.outside is None or not prompts:
            return PendingRollout(indices, own, prompts)
        outside, arguments = self.outside, self._build_arguments(prompts, own)
        if all(prompt.start is None for prompt in prompts):
            return PendingRollout(indices, own, prompts, outside.start(*arguments))
        # The turns of the rounds that have begun are asked for in turn.
        completions = self._episodes.submit(
            sample_episodes,
            *arguments,
            lambda *turn: outside.start(*turn).result(),
            self.policy.prompts,
            self.runner,
            self._refused,
        )
        return PendingRollout(indices, own, prompts, completions)

    def _build_arguments(self, prompts: Sequence[Prompt], own: Sequence[int]) -> SamplingArguments:
        """Return the prompts of all groups, then their other forms, and what to sample behind them.

        A completion has the same number in its group, and so the same random stream, behind either.
        """
        rollout, size = self.settings.rollout, self.settings.rollout.num_generations
        clean = size - self._varying.count_variants(size)
        pairs = [(i, p) for i, p in zip(own, prompts, strict=True) if p.variant is not None]
        steps = [1 if p.start is None else rollout.forks for p in prompts]
        parts = [
            (p, range(0, size if p.variant is None else clean, step))
            for p, step in zip(prompts, steps, strict=True)
        ]
        parts += [(p.variant, range(clean, size)) for _, p in pairs if p.variant is not None]
        asked, numbers = ([*column] for column in zip(*parts, strict=True))
        seeds = [(self.settings.seed, index) for index in (*own, *(i for i, _ in pairs))]
        return asked, build_sampling_settings(self.policy.distribution, rollout), numbers, seeds

    def _check_sharing(self, groups: Sequence[Group]) -> None:
        """Check shared prompts on all ranks if one of them has a much larger group than before."""
        policy, check = self.policy, self.policy.sharing_check
        if check is None:
            return
        is_larger = policy.shared and check.is_larger(groups)
        if any_rank(self.accelerator, is_larger or not policy.shared):
            if policy.shared and self.outside is None:
                policy.check_groups(groups)
            elif policy.shared:
                with self.strategy.gathered():
                    policy.check_groups(groups)
                policy.engine.clear_image_features()  # the update encodes as it does later
            if any_rank(self.accelerator, not policy.shared) and policy.shared:
                policy.repeat_prompts()

    def _add_ranks(self, numbers: list[int]) -> list[int]:
        return [sum(column) for column in zip(*gather_object([numbers]), strict=True)]

    def _own_indices(self, indices: Sequence[int]) -> list[int]:
        if self.accelerator.num_processes == 1:
            return list(indices)
        examples = (self.stream[index] for index in indices)
        costs = [self.policy.prompts.estimate_tokens(example, self.task) for example in examples]
        shares = balance_by_cost(costs, self.accelerator.num_processes)
        return [indices[place] for place in shares[self.accelerator.process_index]]

    def _make_groups(self, begun: PendingRollout, task: Task) -> list[Group]:
        stopwatch, prompts = self.policy.stopwatch, begun.prompts
        if not prompts:
            return []
        with stopwatch("rollout"):
            if begun.completions is None:
                arguments = self._build_arguments(prompts, begun.own)
                more = self._sample_within_memory, self.policy.prompts, self.runner, self._refused
                completions = sample_episodes(*arguments, *more)
            else:
                completions = wait_for(begun.completions, self._stop_request)
                self._count_generation(begun)
        return self._revise(self._score(task, *join_groups(prompts, completions)), begun, task)

    def _score(
        self, task: Task, prompts: Sequence[Prompt], completions: Sequence[tuple[Completion, ...]]
    ) -> list[Group]:
        for members in completions:
            once = {c.trunk: c.trunk_length for c in members if c.trunk is not None}
            again = sum(once[c.trunk] for c in members if c.trunk is not None)
            self.num_tokens += sum(len(c.token_ids) for c in members) - again + sum(once.values())
        with self.policy.stopwatch("reward"):
            return score_groups(self.scorer, task, prompts, completions)

    def _revise(self, groups: list[Group], begun: PendingRollout, task: Task) -> list[Group]:
        """Sample the groups anew that a method wants to be further turns of one completion."""
        found = {n: own for n, group in enumerate(groups) if (own := self._reviser.revise(group))}
        if not found:
            return groups
        prompts = [groups[n].prompt for n in found]
        arguments = self._build_arguments(prompts, [begun.own[n] for n in found])
        firsts = [(groups[n].completions[place], text) for n, (place, text) in found.items()]
        sample, outside = self._sample_within_memory, self.outside
        if outside is not None:
            sample = lambda *turn: wait_for(outside.start(*turn), self._stop_request)  # noqa: E731
        with self.policy.stopwatch("rollout"):
            parts = sample_next_turns(*arguments, firsts, sample, self.policy.prompts)
        for number, group in zip(found, self._score(task, prompts, parts), strict=True):
            if group.completions:
                self.num_tokens -= group.completions[0].trunk_length  # sampled in the first round
                groups[number] = group
        return groups

    def _count_generation(self, begun: PendingRollout) -> None:
        """Count the seconds since the sampling began, or since the one before it had ended."""
        ended = begun.ended[0] if begun.ended else time.perf_counter()
        seconds = self.policy.stopwatch.seconds
        spent = ended - max(begun.began, self._last_end)
        seconds["generation"], self._last_end = seconds.get("generation", 0.0) + spent, ended

    def _sample_within_memory(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        numbers: Sequence[range],
        seeds: Seeds,
        begun: Sequence[int] = (),
    ) -> list[tuple[Completion, ...]]:
        """Sample with a token budget that is halved if memory runs out; the result is the same."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        minimum = longest + max(map(len, numbers)) * self.settings.rollout.max_completion_length
        # FSDP2 does not reshard a rank's weights after an error within a forward pass, and its
        # ranks would then gather other tensors: they stop at the end of the round.
        check = self._stop_request.check if self.strategy.may_retry else lambda: None
        while True:
            try:
                return self.policy.sample(
                    prompts, sampling, numbers, seeds, self.budget.tokens, check, begun
                )
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.budget.limit <= minimum:
                    raise UserError(
                        f"out of memory while sampling {max(map(len, numbers))} completions "
                        f"of one prompt of {longest} tokens: lower rollout.num_generations, "
                        "rollout.max_completion_length or policy.max_pixels"
                    ) from error
            self.budget.halve(minimum * len(prompts), minimum)


def join_groups(
    prompts: Sequence[Prompt], parts: Sequence[tuple[Completion, ...]]
) -> tuple[list[Prompt], list[tuple[Completion, ...]]]:
    """Join the completions of ``_build_arguments``' prompts; return prompts without other forms."""
    rest, groups = iter(parts[len(prompts) :]), []
    for prompt, members in zip(prompts, parts, strict=False):
        if (other := prompt.variant) is not None:
            members = (*members, *(replace(c, variant=other.label) for c in next(rest)))
        groups.append(members)
    return [p if p.variant is None else replace(p, variant=None) for p in prompts], groups


def select_usable(
    policy: Policy,
    examples: Sequence[Example],
    task: Task,
    settings: Settings,
    methods: Mapping[str, Method],
) -> Sequence[Example]:
    """Return the training examples that the model and the methods can use."""
    skip, sampler = settings.data.on_bad_row == "skip", settings.rollout.sampler
    without_videos = [m.block or m.name for m in methods.values() if not m.has_videos]
    # vLLM reads clips as transformers does only in these families: see serve/requests.py.
    if sampler != "policy" and not policy.family.has_texts_between_frames:
        without_videos.append(f"rollout.sampler={sampler}")
    checks = [method.check_examples(policy, task, settings) for method in methods.values()]

    def check(example: Example) -> None:
        if without_videos and any(image.kind == "video" for image in example.images):
            raise UserError(f"{example.name}: {without_videos[0]} does not support its video")
        for check_own in checks:
            check_own(example)

    return policy.prompts.select_usable(examples, task, skip, check)
