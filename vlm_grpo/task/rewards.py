"""The rewards and metrics of a task: its rules, their weights and what they return."""

from __future__ import annotations

import inspect
import math
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

import numpy as np

from vlm_grpo.errors import shorten
from vlm_grpo.types import Batch
from vlm_grpo.utils.http_json import ServiceError
from vlm_grpo.utils.time_limit import CallTimeout

FAILURES = (Exception, SystemExit, CallTimeout)
"""Exceptions of a user's parser or rule that must not stop a run."""

Outcome = tuple[Any, str | None]
"""The value of a parser or rule for one completion; None, and the traceback, if it failed."""
_ARGUMENTS = ("answer", "example", "text", "tokens")
_LARGEST = 1e15  # Absolute value of a reward: the sum of the squares of many must be a float32
_OPEN_FOLDER = getattr(os, "O_PATH", os.O_RDONLY)
_FOLDER_LOCK, _FOLDERS = threading.Lock(), list[int]()  # of each thread inside, that of the first


@dataclass(frozen=True)
class Rule:
    """A reward or a metric: a method of a task."""

    kind: str  #: "reward" or "metric"
    weight: float  #: weight of a reward in the total
    without_answer: float | None  #: value for a completion without an answer
    arguments: int  #: how many of answer, example, text and number of tokens the method takes
    needs_answer: bool = True  #: whether the method is called only for completions with an answer
    optional: bool = False  #: whether a reward is used only if the task's ``weights`` name it
    batch: bool = False  #: whether the method takes a ``Batch`` and returns a value per completion
    #: time limit of a batch; None: that of one completion times their number
    seconds: float | None = None


Schedule = float | list[list[float]]
"""A number; or one that changes with the training: pairs of a progress from 0 to 1 and a value, in
ascending order, with straight lines between them and the first and last value beyond them."""


def get_scheduled(schedule: Schedule, progress: float) -> float:
    """Return the value of a schedule at a progress from 0 to 1.

    >>> get_scheduled([[0.0, 0.5], [0.5, 0.5], [1.0, 0.9]], 0.75)
    0.7
    """
    if not isinstance(schedule, list):
        return schedule
    places, values = zip(*schedule, strict=True)
    return float(np.interp(progress, places, values))


def _check_weight(name: str, weight: Any) -> None:
    is_number = isinstance(weight, Real) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight):
        raise ValueError(f"weight of {name} must be a finite number, not {weight!r}")


def check_schedule(name: str, weight: Schedule) -> None:
    if not isinstance(weight, list):
        _check_weight(name, weight)
        return
    places = [pair[0] for pair in weight if len(pair) == 2]
    is_whole = places and len(places) == len(weight)
    if not is_whole or places != sorted({*places}) or places[0] < 0 or places[-1] > 1:
        raise ValueError(
            f"weight of {name} must be a number, or pairs of a progress from 0 to 1 and a weight, "
            f"in ascending order, not {weight!r}"
        )
    for _, value in weight:
        _check_weight(name, value)


def _rule(kind: str, weight: float, without_answer: float | None, **more: Any) -> Callable:
    for value in (weight, without_answer):
        if callable(value):
            name = getattr(value, "__qualname__", value)
            raise TypeError(f"{name}: write @{kind}(), with parentheses")

    def decorate(method: Callable) -> Callable:
        arguments = tuple(inspect.signature(method).parameters)[1:]
        name, is_batch = method.__qualname__, more.get("batch")
        if is_batch and arguments != ("batch",):
            raise TypeError(f"{kind} {name}{arguments} must take (self, batch)")
        takes_one = len(arguments) >= 2 and arguments == _ARGUMENTS[: len(arguments)]
        if not is_batch and not takes_one and arguments != ("episode",):
            raise TypeError(
                f"{kind} {name}{arguments} must take (self, answer, example), then text and "
                f"tokens if it needs them; (self, episode); or (self, batch), with "
                f"@{kind}(batch=True)"
            )
        if more.get("seconds") is not None and not (is_batch and more["seconds"] > 0):
            raise TypeError(f"{kind} {name}: seconds must be positive, and needs batch=True")
        _check_weight(name, weight)
        method.rule = Rule(kind, weight, without_answer, len(arguments), **more)  # type: ignore[attr-defined]
        return method

    return decorate


def reward(
    weight: float = 1.0,
    *,
    needs_answer: bool = True,
    optional: bool = False,
    batch: bool = False,
    seconds: float | None = None,
) -> Callable:
    """Mark a method ``(self, answer, example[, text[, tokens]])`` of a task as a reward.

    A method ``(self, episode)``, of a task or of its environment, gets a ``Candidate``, with the
    turns of the episode.

    Evaluation and scoring from a file know only the text, and leave out rewards that take
    ``tokens``, the completion's number of tokens.

    With ``batch=True`` the method is ``(self, batch)``: it gets a ``Batch`` of completions and
    returns one value for each, in their order. An exception in place of a value, such as those of
    ``Batch.map``, makes this completion unscorable; one that the method raises, all of them.

    Args:
        weight: weight in the total reward; 0: log the reward without training on it.
        needs_answer: call the method only for completions with an answer; the others earn 0.
            False is for penalties, which get ``answer`` None for a completion without one:
            otherwise giving no answer would avoid the penalty.
        optional: use the reward only if the task's ``weights`` name it.
        batch: the method sees all completions of a batch, for example to compare those of a group,
            to call a reward model, or to ask a remote judge.
        seconds: time limit of a batch; ``math.inf``: none; None: ``rollout.reward_timeout`` times
            the number of its completions.
    """
    more = {"needs_answer": needs_answer, "optional": optional}
    return _rule("reward", weight, 0.0, **more, batch=batch, seconds=seconds)


def metric(
    without_answer: float | None = 0.0, *, batch: bool = False, seconds: float | None = None
) -> Callable:
    """Mark a method ``(self, answer, example[, text[, tokens]])`` of a task as a metric.

    A completion without an answer has the value ``without_answer``; None leaves it out of the mean.
    The other arguments are those of ``reward``.
    """
    return _rule("metric", 0.0, without_answer, batch=batch, seconds=seconds)


@contextmanager
def contained() -> Iterator[None]:
    """Keep the working directory from a user's method, and end here a process that it has forked,
    which would go on as a second run in the same folder."""
    process, status = os.getpid(), 0
    with stay_in_folder():
        try:
            yield
        except BaseException as error:
            status = getattr(error, "code", 1) or 0
            raise
        finally:
            if os.getpid() != process:
                os._exit(status if isinstance(status, int) else 1)


def attempt(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Return what a user's method returns, or None and the traceback of what it raises."""
    try:
        with contained():
            return function(*arguments), None
    except FAILURES as error:
        # The message of a service that failed says all, without those of its threads.
        is_service = isinstance(error, ServiceError)
        text = f"{type(error).__name__}: {error}" if is_service else traceback.format_exc()
        return None, shorten(text)


@contextmanager
def stay_in_folder() -> Iterator[None]:
    """Return to the working directory at the end: user code inside, perhaps of several threads,
    may change it, and paths of the run, which are relative to it, would lead elsewhere."""
    with _FOLDER_LOCK:
        _FOLDERS.append(_FOLDERS[0] if _FOLDERS else os.open(".", _OPEN_FOLDER))
    try:
        yield
    finally:
        with _FOLDER_LOCK:
            os.fchdir(folder := _FOLDERS.pop())
            if not _FOLDERS:
                os.close(folder)


def to_finite(value: Any) -> float:
    """Convert what a rule returned to a finite number; raise ``ValueError``, or an exception that
    it returned in place of a value."""
    if isinstance(value, BaseException):
        raise value
    number = float(value)
    if not abs(number) <= _LARGEST:  # not a number, too
        raise ValueError(f"it returned {number}, which is not between ±{_LARGEST:g}")
    return number


def call_batch_rule(
    method: Callable[[Batch], Iterable[Any]], batch: Batch, call: Callable[..., Any]
) -> list[Outcome]:
    """Return the outcome of a batch rule for each completion; nothing that it raises is raised."""

    def list_values() -> list[Any]:
        values = call(lambda: list(method(batch)))
        if len(values) != len(batch):
            raise ValueError(f"it returned {len(values)} values for {len(batch)} completions")
        return values

    values, failure = attempt(list_values)
    if failure is not None:
        return [(None, failure)] * len(batch)
    return [attempt(to_finite, value) for value in values]


@cache
def find_rules(task: type) -> dict[str, Rule]:
    """Return the rules of a class and its bases by name, those of the bases first."""
    found: dict[str, Rule] = {}
    for base in reversed(task.__mro__):
        for name, member in vars(base).items():
            if isinstance(rule := getattr(member, "rule", None), Rule):
                found[name] = rule
    return found
