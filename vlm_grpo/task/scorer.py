"""Scoring of completions with a task whose rewards may raise, hang or end their process.

``FailureGuard`` ends a run in which a reward fails on every completion.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from vlm_grpo.errors import UserError, shorten
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.task.environment import Environment
from vlm_grpo.task.registry import get_file, load_file
from vlm_grpo.task.rewards import Outcome, call_batch_rule
from vlm_grpo.types import Batch, Candidate, EpisodeTurn, Example, Score
from vlm_grpo.utils.parallel_calls import ValueCache
from vlm_grpo.utils.time_limit import can_interrupt, time_limit
from vlm_grpo.utils.worker_pool import WorkerEnded, WorkerPool, dump, gather

logger = logging.getLogger(__name__)

REWARD_TIMEOUT = 10.0  #: Default time limit in seconds of one reward for one completion
_ENOUGH = 4
"""Failures in a row, without a success, after which a reward counts as failing on everything, even
if most completions had no answer for it."""
_ROUNDING = 1e-6
_GRACE = 1.0  # Seconds after the time limit at which an unresponsive worker is killed


@dataclass(frozen=True)
class Sent:
    """A pickled task or environment, and the files that a worker must load before unpickling it.

    Unpickling this gives the object, before the time limit of a call begins."""

    pickled: bytes
    files: tuple[str, ...] = ()
    changes: bool = False  # whether calls change the object, so that each needs its own
    #: number of the worker that has the rest of its state; -1: any has it. None: all of it is here
    place: int | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes, tuple[str, ...]]]:
        return _unpickle if self.changes else _unpickle_once, (self.pickled, self.files)


class RewardScorer:
    """A scorer of completions, in which a failure affects one completion only.

    A batch rule that raises or is too slow affects all completions of its batch. In this process,
    Python code is interrupted at the time limit, but compiled code can delay that; a worker process
    is killed, and replaced if it exits. Both ways give the same scores in the same order.

    Args:
        seconds: time limit of one reward, metric or parser for one completion; None: no limit.
        workers: number of worker processes; 0: score in this process, or in one worker where this
            process cannot interrupt calls (``can_interrupt``).
        cache: file for the values that ``Batch.map`` gets; None: they are not kept.
        logs_failures: log the first failure of each rule.
    """

    def __init__(
        self,
        seconds: float | None = REWARD_TIMEOUT,
        workers: int = 0,
        cache: Path | None = None,
        logs_failures: bool = True,
    ) -> None:
        self.seconds, self.workers, self.logs_failures = seconds, workers, logs_failures
        self.cache = None if cache is None else ValueCache(cache)
        self._pool = WorkerPool(max(1, workers), "reward")
        self._logged: set[str] = set()

    def __call__(
        self,
        task: Task,
        texts: Sequence[str],
        examples: Sequence[Example],
        tokens: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        turns: Sequence[Sequence[EpisodeTurn]] | None = None,
    ) -> list[Score]:
        """Score each completion, given its text and example.

        Args:
            tokens: number of tokens of each completion; None: unknown.
            groups: number of each completion's group, for batch rules; None: each is a group of
                its own.
            turns: those of each completion's episode; None: there are no episodes.

        Raises:
            UserError: the workers do not start, or the task cannot be pickled.
        """
        count = len(texts)
        numbers = range(count) if groups is None else groups
        episodes = map(tuple, turns or [()] * count)
        columns = examples, texts, tokens or [None] * count, numbers, episodes
        candidates = [Candidate(None, *own) for own in zip(*columns, strict=True)]
        found: dict[int, Score] = {}
        for name, part, indices in group_by_source(task, examples):
            own = self._score_part(part, [candidates[i] for i in indices])
            found |= zip(indices, (score.with_prefix(name) for score in own), strict=True)
        scores = [found[index] for index in range(count)]
        for score, example in zip(scores, examples, strict=True):
            self._log_failures(score, example)
        return scores

    def _score_part(self, task: Task, candidates: Sequence[Candidate]) -> list[Score]:
        results = self._run(_apply_rules, task, [(own,) for own in candidates], self.seconds)
        outcomes = [
            self._apply_each_rule(task, own) if isinstance(result, BaseException) else result
            for result, own in zip(results, candidates, strict=True)
        ]
        return task.build_scores(candidates, outcomes, partial(self._apply_batch_rule, task))

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers; a later call starts new ones."""
        self._pool.close()

    def _apply_batch_rule(
        self, task: Task, name: str, candidates: tuple[Candidate, ...]
    ) -> list[Outcome]:
        seconds = task.batch_rules()[name].seconds
        if seconds is None and self.seconds is not None:
            seconds = self.seconds * len(candidates)
        seconds = None if seconds == math.inf else seconds
        batch = Batch(candidates, self.cache)
        (result,) = self._run(_apply_batch_rule, task, [(name, batch)], seconds)
        if isinstance(result, BaseException):
            return [(None, _describe_end(result, seconds))] * len(batch)
        return result

    def _log_failures(self, score: Score, example: Example) -> None:
        """Log the first failure of each rule; the metrics count all of them."""
        for name, trace in score.failures.items() if self.logs_failures else ():
            if name not in self._logged:
                self._logged.add(name)
                logger.warning(
                    "%s failed on example %s, which is not used where this value is needed; "
                    "later failures are only counted (rewards/NAME/failed). The first:\n%s",
                    *(name, example.id, trace),
                )

    def _apply_each_rule(self, task: Task, candidate: Candidate) -> dict[str, Outcome]:
        """Score a completion that ended its worker, with a separate job for each rule."""
        names = ["parse", *task.applicable_rules(candidate.tokens)]
        results = self._run(_apply_rules, task, [(candidate, name) for name in names], self.seconds)
        outcomes: dict[str, Outcome] = {
            name: (None, _describe_end(result, self.seconds))
            if isinstance(result, BaseException)
            else result[name if result["parse"][1] is None else "parse"]
            for name, result in zip(names, results, strict=True)
        }
        if outcomes["parse"][1] is not None:
            outcomes.update(dict.fromkeys(names[1:], (None, None)))
        return outcomes

    def _run(
        self, function: Callable[..., Any], task: Task, jobs: Sequence[tuple], seconds: float | None
    ) -> list[Any]:
        """Return the results of ``function(seconds, task, *job)``, or what ended its worker."""
        if not self.workers and (self.seconds is None or can_interrupt()):
            return [function(seconds, task, *job) for job in jobs]
        sent, limit = send(task), None if seconds is None else seconds + _GRACE
        calls = ((seconds, sent, *job) for job in jobs)
        return gather(self._pool.schedule(function, call, limit) for call in calls)


def group_by_source(task: Task, examples: Sequence[Example]) -> list[tuple[str, Task, list[int]]]:
    """Return each source's name ("" if there is no mixture), its task, and its examples' places."""
    found: dict[str, tuple[str, Task, list[int]]] = {}
    for position, example in enumerate(examples):
        name, own = task.resolve(example)
        found.setdefault(name, (name, own, []))[2].append(position)
    return list(found.values())


def get_full_reward(task: Task) -> float:
    """Return the sum of the weights that a right answer earns, or without any, those of rewards
    for completions without an answer, too; penalties only subtract."""
    rules, weights = task.reward_rules(), task.reward_weights().items()
    given = [(weight, rules[name].needs_answer) for name, weight in weights if weight > 0]
    return sum(weight for weight, reads in given if reads) or sum(weight for weight, _ in given)


def get_gold_reward(task: Task, example: Example) -> float:
    """Return the reward that the gold answer of an example must earn; ``gold_reward`` may fail."""
    _, own = task.resolve(example)
    try:
        return get_full_reward(own) * own.gold_reward(example)
    except FAILURES as error:  # a user's method may raise anything
        raise UserError(f"{example.name}: gold_reward failed: {error}") from error


def earns(score: Score, least: float) -> bool:
    """Return whether a completion earned a reward, up to rounding."""
    return score.total is not None and score.total >= least - _ROUNDING


def measure_pass(task: Task, example: Example, score: Score) -> float:
    """Return the part of a completion's answer that is right, from 0 to 1: its primary metric.

    Where that is an error, or has another value, it is 1 for the full reward and 0 for less.
    """
    source, own = task.resolve(example)
    name = f"{source}/{own.primary_metric}" if source else own.primary_metric
    values = {**score.rewards, **score.metrics}
    value = values.get(name) or 0.0
    if own.lower_is_better or name not in values or not 0 <= value <= 1:
        return float(earns(score, get_gold_reward(task, example)))
    return value


def send(value: Any) -> Sent:
    """Return a task or an environment for a worker; ``UserError``: it cannot be pickled."""
    environment = value if isinstance(value, Environment) else value.environment
    target = getattr(environment, "target", None)  # an object or a class, perhaps of a third file
    kinds = type(value), type(environment), target if isinstance(target, type) else type(target)
    files = dict.fromkeys(file for file in map(get_file, kinds) if file is not None)
    try:
        place = -1 if getattr(value, "keeps_worker", False) else None
        return Sent(dump(value), tuple(files), isinstance(value, Environment), place)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        remedy = ", or set rollout.reward_workers=0" if isinstance(value, Task) else ""
        raise UserError(
            f"{type(value).__name__} cannot be sent to worker processes ({error}): define it in a "
            f"file of its own{remedy}"
        ) from error


_load_once = lru_cache(load_file)


def _unpickle(pickled: bytes, files: tuple[str, ...]) -> Any:
    for file in files:
        _load_once(Path(file))
    try:
        return pickle.loads(pickled)  # written by the process that started this one
    except FAILURES as error:  # the user's class may raise anything; no call can be made
        raise UserError(f"its task: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=2)  # one for training, which changes with the progress, and one for evaluation
def _unpickle_once(pickled: bytes, files: tuple[str, ...]) -> Any:
    return _unpickle(pickled, files)


def _apply_rules(
    seconds: float | None, task: Task, candidate: Candidate, only: str | None = None
) -> dict[str, Outcome]:
    with time_limit(seconds) as call:
        return task.apply_rules(candidate, call, only)


def _apply_batch_rule(seconds: float | None, task: Task, name: str, batch: Batch) -> list[Outcome]:
    with time_limit(seconds) as call:
        return call_batch_rule(getattr(task, name), batch, call)


def _describe_end(error: BaseException, seconds: float | None) -> str:
    if isinstance(error, WorkerEnded):
        return f"the process that scored it ended with {error}"
    if isinstance(error, TimeoutError) and seconds is not None:
        return f"it took longer than its limit of {seconds:g} s and was killed"
    return shorten(repr(error))


class FailureGuard:
    """A check that every reward with a weight works on some completion.

    If it fails on all of them, nothing is learned, although every metric is finite.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()

    def check(
        self,
        task: Task,
        scores: Sequence[Score],
        examples: Sequence[Example],
        add_ranks: Callable[[list[int]], list[int]] = list,
    ) -> None:
        """Raise ``UserError`` on all ranks if a reward failed on every completion that it was
        called for: on all of a round or of an evaluation, or on ``_ENOUGH`` since it last worked.

        ``add_ranks`` returns the sums of some numbers over all ranks."""
        rules = task.reward_rules()
        names = [name for name, weight in task.reward_weights().items() if weight]
        counts = [len(scores)]
        for name in names:
            needs_answer = rules[name].needs_answer
            values = [
                score.rewards[name]
                for score in scores
                if name in score.rewards
                and (score.answer is not None or not needs_answer or "parse" in score.failures)
            ]
            counts += [len(values), values.count(None)]
        total, *counts = add_ranks(counts)
        for name, called, failed in zip(names, counts[::2], counts[1::2], strict=True):
            if failed < called:
                self._in_a_row[name] = 0
                continue
            self._in_a_row[name] += failed
            if failed and (failed == total or self._in_a_row[name] >= _ENOUGH):
                firsts = (
                    f"here first on example {example.id}: {trace.strip().splitlines()[-1]:.500}"
                    for score, example in zip(scores, examples, strict=True)
                    if (trace := score.failures.get(name) or score.failures.get("parse"))
                )
                raise UserError(
                    f"the reward {name} failed on every completion ({self._in_a_row[name]} in a "
                    f"row), {next(firsts, 'all of other processes')}\n"
                    "fix the reward, or what it depends on, and start the command again; a run "
                    "that has checkpoints continues with resume=true"
                )
