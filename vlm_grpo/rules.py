"""Rules of a task: the methods marked as rewards and metrics, and checks of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

_ARGUMENTS = ("answer", "example", "text", "tokens")


@dataclass(frozen=True)
class Rule:
    """A reward or a metric: a method of a task.

    Attributes:
        kind: "reward" or "metric".
        weight: weight of a reward in the total.
        without_answer: value for a completion without an answer.
        takes_text: whether the method takes the completion's text.
        takes_tokens: whether the method takes the completion's number of tokens.
        needs_answer: whether the method is called only for completions with an answer.
        optional: whether a reward is used only if the task's ``weights`` name it.
    """

    kind: str
    weight: float
    without_answer: float | None
    takes_text: bool
    takes_tokens: bool
    needs_answer: bool = True
    optional: bool = False


def check_weight(name: str, weight: Any) -> None:
    """Raise ``ValueError`` if the weight of a rule is not a finite number."""
    is_number = isinstance(weight, Real) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight):
        raise ValueError(f"weight of {name} must be a finite number, not {weight!r}")


def _rule(kind: str, weight: float, without_answer: float | None, **more: bool) -> Callable:
    for value in (weight, without_answer):
        if callable(value):
            name = getattr(value, "__qualname__", value)
            raise TypeError(f"{name}: write @{kind}(), with parentheses")

    def decorate(method: Callable) -> Callable:
        arguments = tuple(inspect.signature(method).parameters)[1:]
        if len(arguments) < 2 or arguments != _ARGUMENTS[: len(arguments)]:
            raise TypeError(
                f"{kind} {method.__qualname__}{arguments} must take (self, answer, example), "
                "then text and tokens if it needs them"
            )
        check_weight(method.__qualname__, weight)
        takes = {"takes_text": "text" in arguments, "takes_tokens": "tokens" in arguments}
        method.rule = Rule(kind, weight, without_answer, **takes, **more)  # type: ignore[attr-defined]
        return method

    return decorate


def reward(weight: float = 1.0, *, needs_answer: bool = True, optional: bool = False) -> Callable:
    """Mark a method ``(self, answer, example[, text[, tokens]])`` of a task as a reward.

    ``tokens`` is the completion's number of tokens. Evaluation and scoring from a file know
    only the text and leave out rewards that take ``tokens``.

    Args:
        weight: weight in the total reward; 0: log the reward without training on it.
        needs_answer: call the method only for completions with an answer; the others earn 0.
            False is for penalties, which get ``answer`` None for a completion without one:
            otherwise giving no answer would avoid the penalty.
        optional: use the reward only if the task's ``weights`` name it.
    """
    return _rule("reward", weight, 0.0, needs_answer=needs_answer, optional=optional)


def metric(without_answer: float | None = 0.0) -> Callable:
    """Mark a method ``(self, answer, example[, text[, tokens]])`` of a task as a metric.

    Args:
        without_answer: value for a completion without an answer; None: leave such completions
            out of the mean.
    """
    return _rule("metric", 0.0, without_answer)


def to_finite(value: Any) -> float:
    """Convert the value that a rule returned to a finite number.

    Raises:
        ValueError: it is infinite or not a number.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, which is not a finite number")
    return number


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
