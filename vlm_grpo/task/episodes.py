"""The running of environments in worker processes, where nothing that a tool does stops a run."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from vlm_grpo.errors import UserError
from vlm_grpo.task.environment import Environment, clean_text
from vlm_grpo.task.rewards import FAILURES, contained
from vlm_grpo.task.scorer import Sent, send
from vlm_grpo.task.task import Task
from vlm_grpo.types import EpisodeStart, EpisodeTurn, Example, Observed, ToolCall
from vlm_grpo.utils.chat import IMAGE
from vlm_grpo.utils.time_limit import CallTimeout, time_limit
from vlm_grpo.utils.worker_pool import WorkerEnded, WorkerPool, gather

TOOL_MEMORY = 8 * 2**30  #: Bytes that a worker process may hold, on Linux
TOOL_TIMEOUT = 30.0  #: Time limit in seconds of one call of a tool
_GRACE = 1.0  # seconds after the time limit at which an unresponsive worker is killed

_Parts = tuple[Any, ...]  # of a ``Sent``, which pickle would give as the environment itself
Step = tuple[Sent, ToolCall | None, Observed | None]
"""The state of an environment after a text, the call in it, and what is read next, if anything."""


def count_calls(turns: Sequence[EpisodeTurn]) -> dict[str, float | None]:
    """Return the metrics of an episode's calls: their number, whether there is one, the share of
    errors (None without a call), and whether it was cut before its answer. Without turns: none."""
    if not turns:
        return {}
    answers = [turn.observed for turn in turns if turn.observed is not None]
    errors = sum(answer.is_error for answer in answers) / len(answers) if answers else None
    cut, called = (float(bool(value)) for value in (turns[-1].observed, answers))
    values = {"calls": len(answers), "called": called, "errors": errors, "cut": cut}
    return {f"tools/{name}": value for name, value in values.items()}


class EnvironmentRunner:
    """A runner of environments, whose tools are called in worker processes.

    An environment is sent to a worker with its state, and comes back after the call. A call that
    raises, takes longer than ``seconds``, needs more than ``TOOL_MEMORY`` or ends its process is
    answered by a message, and leaves the state as it was. It may be used from several threads.
    """

    def __init__(self, workers: int = 1, seconds: float | None = TOOL_TIMEOUT) -> None:
        self.seconds = seconds
        self._pool = WorkerPool(max(1, workers), "environment")
        # Processes start with their first call.
        self._single = [WorkerPool(1, "environment") for _ in range(max(1, workers))]

    def __enter__(self) -> EnvironmentRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers; a later call starts new ones."""
        for pool in (self._pool, *self._single):
            pool.close()

    def begin(self, environment: Environment, example: Example) -> tuple[Example, EpisodeStart]:
        """Begin the episodes of an example; return it with what ``reset`` shows, and their start.

        ``UserError``: ``reset`` fails.
        """
        sent = send(environment)
        (result,) = self._run(_begin, [(sent, example)], [None])
        if isinstance(result, UserError):
            raise result
        if isinstance(result, BaseException):
            raise UserError(
                f"{example.name}: reset of {type(environment).__name__} failed: "
                f"{self._describe(result)}"
            ) from result
        state, shown = result
        masks_long = environment.over_turn == "mask"
        start = EpisodeStart(
            Sent(*state), environment.max_turns, masks_long, environment.call_tags[1]
        )
        if shown is None:
            return example, start
        text, question = shown.text, example.question
        if IMAGE not in "".join((question, *(turn.text for turn in example.history))):
            text = text.replace(IMAGE, "")  # all images stand before the question
        question = "\n".join(filter(None, (question, text)))
        images = (*example.images, *shown.images)
        return replace(example, question=question, images=images), start

    def step(self, states: Sequence[Sent], texts: Sequence[str]) -> list[Step]:
        """Return what follows on the texts of several episodes, in their order."""
        count = len(self._single)
        places = [n % count if s.place == -1 else s.place for n, s in enumerate(states)]
        results = self._run(_step, list(zip(states, texts, strict=True)), places)
        found: list[Step] = []
        for state, place, result in zip(states, places, results, strict=True):
            if isinstance(result, BaseException):
                message = clean_text(f"Error: {self._describe(result)}")
                found.append((state, None, Observed(message, is_error=True)))
            else:
                changed, call, observed = result
                state = replace(Sent(*changed), place=place) if changed else state
                found.append((state, call, observed))
        return found

    def _run(
        self, function: Any, jobs: Sequence[tuple[Any, ...]], places: Sequence[int | None]
    ) -> list[Any]:
        limit = None if self.seconds is None else self.seconds + _GRACE
        pools = (self._pool if place is None else self._single[place] for place in places)
        calls = ((pool, (self.seconds, *job)) for pool, job in zip(pools, jobs, strict=True))
        return gather([pool.schedule(function, job, limit) for pool, job in calls])

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, WorkerEnded):
            return f"the tool's process ended ({error})"
        if isinstance(error, TimeoutError | CallTimeout):
            return f"the tool took longer than its limit of {self.seconds:g} s"
        return f"{type(error).__name__}: {error}"[:1000]


def demonstrate(
    runner: EnvironmentRunner, start: EpisodeStart, task: Task, example: Example
) -> list[EpisodeTurn]:
    """Return the turns of the environment's demonstration of an example that has begun, without the
    answer; ``UserError``: it cannot be demonstrated."""
    environment = task.environment.adapt(task.environment.frame)
    environment.example = example
    try:
        calls = list(environment.demonstrate(example))[: start.max_turns - 1]
        texts = [task.enclose("Look closer.", environment.write(call)) for call in calls]
    except FAILURES as error:  # a user's method may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{example.name}: demonstrate failed: {reason}") from error
    state, turns = start.state, list[EpisodeTurn]()
    for text in texts:
        ((state, call, observed),) = runner.step([state], [text])
        turns.append(EpisodeTurn(text, call, observed))
    return turns


def _begin(
    seconds: float | None, environment: Environment, example: Example
) -> tuple[_Parts, Observed | None]:
    _limit_memory()
    with contained(), time_limit(seconds) as call:
        shown = call(environment.begin, example)
    return astuple(send(environment)), shown


def _step(
    seconds: float | None, environment: Environment, text: str
) -> tuple[_Parts | None, ToolCall | None, Observed | None]:
    """Return what ``Step`` says, but None for a state that a failed call leaves as it was."""
    _limit_memory()
    with contained(), time_limit(seconds) as call:
        tool_call, observed = call(environment.step, text)
    has_failed = observed is not None and observed.is_error
    return None if has_failed else astuple(send(environment)), tool_call, observed


def _limit_memory() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = TOOL_MEMORY if most == resource.RLIM_INFINITY else min(TOOL_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
