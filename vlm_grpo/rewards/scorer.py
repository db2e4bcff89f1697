"""What completions earn, whatever a user's rewards do: raise, hang, or end their process."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from vlm_grpo.errors import UserError
from vlm_grpo.registry import get_task_source, load_task_class
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.types import Example, Score
from vlm_grpo.utils.timing import can_interrupt, time_limit

logger = logging.getLogger(__name__)

REWARD_TIMEOUT = 10.0
"""Seconds that one reward may take for one completion, where no setting says otherwise."""
_GRACE = 1.0
"""Seconds after which a worker that does not heed its time limit is killed."""
_START_SECONDS = 120.0
"""Seconds in which a worker must have imported what it needs."""

Said = tuple[str, Example, int | None]
"""A completion's text, the row that it answers, and its number of tokens if that is known."""
Sent = tuple[bytes, str | None]
"""A task as a worker gets it: pickled, and the file that must be loaded first, if any."""
Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of this module and its arguments."""


class RewardScorer:
    """Scores completions with a task; a failure costs that completion and nothing else.

    In this process Python code is interrupted at the time limit, which compiled code can hold up;
    a worker process is killed, and survived where it ends by itself. Both ways the scores are the
    same, in the same order.

    Args:
        seconds: the most that one reward, metric or parser may take for one completion; None: any
            time.
        workers: processes that score; 0: this one, unless it cannot interrupt (``can_interrupt``),
            where one worker does.
    """

    def __init__(self, seconds: float | None = REWARD_TIMEOUT, workers: int = 0) -> None:
        self.seconds, self.workers = seconds, workers
        self._pool: ProcessPool | None = None
        self._told: set[str] = set()

    def __call__(
        self,
        task: Task,
        texts: Sequence[str],
        examples: Sequence[Example],
        tokens: Sequence[int] | None = None,
    ) -> list[Score]:
        """What the task makes of each text.

        Args:
            task: parses and scores.
            texts: whole completions.
            examples: what each of them answers.
            tokens: how many tokens each of them has; None: not known.

        Raises:
            UserError: the workers do not start, or the task cannot be sent to them.
        """
        said = list(zip(texts, examples, tokens or [None] * len(texts), strict=True))
        if self.workers or not (self.seconds is None or can_interrupt()):
            scores = self._in_workers(task, said)
        else:
            with time_limit(self.seconds) as call:
                scores = [task.score(*one, call) for one in said]
        for score, example in zip(scores, examples, strict=True):
            self._tell(score, example)
        return scores

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _tell(self, score: Score, example: Example) -> None:
        """Log the first failure of each rule; the metrics count all of them."""
        for name, trace in score.failures.items():
            if name not in self._told:
                self._told.add(name)
                logger.warning(
                    "%s failed on example %s, which is left out where its value is needed; later "
                    "failures are only counted (rewards/NAME/failed). The first one:\n%s",
                    name,
                    example.id,
                    trace,
                )

    # Worker processes.

    def _in_workers(self, task: Task, said: Sequence[Said]) -> list[Score]:
        sent = _sendable(task)
        jobs: list[Job] = [(_score, (sent, one, self.seconds)) for one in said]
        return [
            outcome if isinstance(outcome, Score) else self._by_parts(task, sent, one)
            for outcome, one in zip(self._run(jobs), said, strict=True)
        ]

    def _by_parts(self, task: Task, sent: Sent, said: Said) -> Score:
        """The score of a completion whose worker was lost, each rule on its own to find which."""
        names = task.applicable_rules(said[2])
        jobs: list[Job] = [(_part, (sent, said, self.seconds, name)) for name in (None, *names)]
        (answer, failure), *parts = map(self._described, self._run(jobs))
        if failure is not None:
            return task.parse_failure(failure, said[2])
        values = {name: value for name, (value, _) in zip(names, parts, strict=True)}
        failures = {n: why for n, (_, why) in zip(names, parts, strict=True) if why is not None}
        return task.combine(answer, values, failures)

    def _run(self, jobs: Sequence[Job]) -> list[Any]:
        """What each job returned, or the exception that it came to."""
        pool = self._pool = self._running_pool()
        limit = None if self.seconds is None else self.seconds + _GRACE
        futures = [pool.schedule(function, args, timeout=limit) for function, args in jobs]
        return [future.exception() or future.result() for future in futures]

    def _running_pool(self) -> ProcessPool:
        if self._pool is not None and self._pool.active:
            return self._pool
        self.close()
        # Spawned, because a forked child of a process with threads and a GPU may hang.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(max(1, self.workers), initializer=_start_worker, context=context)
        try:
            pool.schedule(_is_up).result(_START_SECONDS)
        except Exception as error:
            pool.stop()
            pool.join()
            raise UserError(
                f"the reward workers did not start ({error!r}): set rollout.reward_workers=0, or, "
                'where a script of yours starts the run, put it under if __name__ == "__main__"'
            ) from error
        return pool

    def _described(self, outcome: Any) -> tuple[Any, str | None]:
        """A part's value and why it failed."""
        if isinstance(outcome, ProcessExpired):
            return None, f"the process that scored it ended with exit code {outcome.exitcode}"
        if isinstance(outcome, TimeoutError):
            return None, f"it took longer than its limit of {self.seconds:g} s and was killed"
        return (None, repr(outcome)) if isinstance(outcome, BaseException) else outcome


def _sendable(task: Task) -> Sent:
    try:
        return pickle.dumps(task), get_task_source(type(task))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"task {type(task).__name__} cannot be sent to the reward workers ({error}): define it "
            "in a file of its own, or set rollout.reward_workers=0"
        ) from error


_prepare = lru_cache(load_task_class)


@lru_cache(maxsize=2)  # the task of training, whose progress moves on, and that of evaluation
def _received(sent: Sent) -> Task:
    payload, source = sent
    if source is not None:
        _prepare(source)
    return pickle.loads(payload)  # of the process that started this one


def _start_worker() -> None:
    # Pebble asks workers to end by a handler in Python, for which compiled code does not stop.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_up() -> bool:
    return True


def _score(sent: Sent, said: Said, seconds: float | None) -> Score:
    with time_limit(seconds) as call:
        return _received(sent).score(*said, call)


def _part(
    sent: Sent, said: Said, seconds: float | None, name: str | None
) -> tuple[Any, str | None]:
    """The answer, or the value of the rule called ``name``; and the traceback where it failed."""
    task = _received(sent)
    text, example, tokens = said
    with time_limit(seconds) as call:
        try:
            answer = call(task.read, text, example)
            if name is None:
                return answer, None
            return task.apply_rule(name, (answer, example, text, tokens), call), None
        except FAILURES:
            return None, traceback.format_exc()
