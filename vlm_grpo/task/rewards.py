"""Rules of a task: the methods marked as rewards and metrics, checks of them, and batch rules.

A batch rule sees many completions at once: ``@reward(batch=True)`` marks a method
``(self, batch)`` that returns one value per completion of the ``Batch``.
"""

from __future__ import annotations

import inspect
import math
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from vlm_grpo.types import Batch
from vlm_grpo.utils.timing import CallTimeout

FAILURES = (Exception, SystemExit, CallTimeout)
"""Exceptions of a user's parser or rule that must not stop a run."""

Outcome = tuple[float | None, str | None]
"""The value of a rule for one completion; None, and the traceback, if the rule failed."""

_ARGUMENTS = ("answer", "example", "text", "tokens")


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
    """Raise ``ValueError`` if a weight is neither a finite number nor a schedule of such."""
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
        if not is_batch and not takes_one:
            raise TypeError(
                f"{kind} {name}{arguments} must take (self, answer, example), then text and "
                f"tokens if it needs them; or (self, batch), with @{kind}(batch=True)"
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


def to_finite(value: Any) -> float:
    """Convert the value that a rule returned to a finite number, or raise ``ValueError``."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, which is not a finite number")
    return number


def call_batch_rule(
    method: Callable[[Batch], Iterable[Any]], batch: Batch, call: Callable[..., Any]
) -> list[Outcome]:
    """Return the outcome of a batch rule for each completion; nothing that it raises is raised."""
    try:
        values = call(lambda: list(method(batch)))
        if len(values) != len(batch):
            raise ValueError(f"it returned {len(values)} values for {len(batch)} completions")
    except FAILURES:
        return [(None, traceback.format_exc())] * len(batch)
    return [_get_outcome(value) for value in values]


def _get_outcome(value: Any) -> Outcome:
    try:
        if isinstance(value, BaseException):
            raise value
        return to_finite(value), None
    except FAILURES:
        return None, traceback.format_exc()


def find_rules(task: type) -> dict[str, Rule]:
    """Return the rules of a class and its bases by name, those of the bases first."""
    found: dict[str, Rule] = {}
    for base in reversed(task.__mro__):
        for name, member in vars(base).items():
            if isinstance(rule := getattr(member, "rule", None), Rule):
                found[name] = rule
    return found


def check_names(task: type, base: type) -> None:
    """Raise ``TypeError`` if a rule or option of a task would replace an attribute of ``base``."""
    shared = {name for name, rule in find_rules(base).items() if rule.optional}
    options = vars(task).get("__annotations__", {})
    for name, member in {**options, **vars(task)}.items():
        rule = getattr(member, "rule", None)
        if isinstance(rule, Rule):
            kind, is_owned = rule.kind, hasattr(base, name) or name in base.__annotations__
        else:
            is_option = name in options and not callable(vars(task).get(name))
            kind = "option" if is_option else "method"
            is_owned = name in shared or (is_option and callable(getattr(base, name, None)))
        if is_owned:
            raise TypeError(
                f"{task.__qualname__}.{name}: the base class {base.__name__} has an attribute "
                f"{name}, which this {kind} would replace: give it another name"
            )


def accept_headline(task: Any) -> None:
    """Accept ``headline``, the former name of ``primary_metric``, with a warning."""
    old, new = (vars(task).get(name) for name in ("headline", "primary_metric"))
    if isinstance(old, str):
        if new not in (None, old):
            raise TypeError(
                f"{task.__qualname__} has headline = {old!r} and primary_metric = {new!r}, two "
                "names for one setting: remove headline"
            )
        task.primary_metric = old
        warnings.warn(
            f"{task.__qualname__}.headline is now called primary_metric: rename it, because the "
            "next version does not accept the old name",
            FutureWarning,
            stacklevel=3,
        )
