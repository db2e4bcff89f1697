"""The base of every task plugin: prompt, parser, rewards, metrics, gold answer, drawing.

A task is one class in one file. Options are annotated class attributes, set where the task is
loaded (``load_task("counting", tags=True)``), so a subclass reads like a small dataclass::

    class Counting(Task):
        '''Count the named objects in one image.'''

        headline = "exact"

        def parse(self, text, example):
            return parse_integer(text)

        def write(self, answer, example):
            return str(answer)

        @reward(weight=1.0)
        def exact(self, answer, example):
            return float(answer == example.answer)
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

from PIL import Image

from vlm_grpo.coordinates import ORIGINAL, CoordinateFrame
from vlm_grpo.parsing import answer_text
from vlm_grpo.types import Example, Score

_ARGUMENTS = ("answer", "example", "text")


@dataclass(frozen=True)
class Rule:
    """A reward or a metric: a method of a task, with its weight and its value without an answer."""

    kind: str
    weight: float
    without_answer: float | None
    sees_text: bool


def _rule(kind: str, weight: float, without_answer: float | None) -> Callable:
    def decorate(method: Callable) -> Callable:
        arguments = tuple(inspect.signature(method).parameters)[1:]
        if arguments not in (_ARGUMENTS[:2], _ARGUMENTS):
            raise TypeError(
                f"{kind} {method.__qualname__}{arguments} must take (self, answer, example) "
                "or (self, answer, example, text)"
            )
        method.rule = Rule(kind, weight, without_answer, sees_text="text" in arguments)  # type: ignore[attr-defined]
        return method

    return decorate


def reward(weight: float = 1.0) -> Callable:
    """Mark a method ``(self, answer, example[, text])`` of a task as a reward.

    It is called only where the completion holds an answer; without one every reward is 0.

    Args:
        weight: its share in the total reward; 0 logs it without training on it.
    """
    return _rule("reward", weight, 0.0)


def metric(without_answer: float | None = 0.0) -> Callable:
    """Mark a method ``(self, answer, example[, text])`` of a task as a metric.

    Args:
        without_answer: the metric's value where the completion holds no answer; None leaves
            such completions out of its mean.
    """
    return _rule("metric", 0.0, without_answer)


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Task:
    """A visual task whose answers a rule can check.

    A subclass defines ``parse`` and ``write`` and at least one ``@reward``; the rest has
    defaults. The same parser serves training, evaluation and offline scoring.

    Attributes:
        tags: ask for ``<answer>…</answer>`` and read the answer there alone.
        thinking: ask for ``<think>…</think>`` first; thinking is never scored.
        frame: the coordinate frame of the model's boxes; the model family sets it.
        weights: reward weights by name, over those in the code; 0 switches one off.
    """

    headline: ClassVar[str]
    """Name of the reward or metric by which models are compared."""

    tags: bool = False
    thinking: bool = False
    frame: CoordinateFrame = ORIGINAL
    weights: Mapping[str, float] = field(default_factory=dict)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.weights) - set(self.rules("reward")))
        if unknown:
            raise ValueError(
                f"task {type(self).__name__} has no reward {', '.join(unknown)}; "
                f"it has {', '.join(self.rules('reward'))}"
            )

    # What a subclass defines.

    def question(self, example: Example) -> str:
        """What to ask about the example, without the words on how to answer."""
        return example.question

    def parse(self, text: str, example: Example) -> Any | None:
        """The answer in ``text`` (tags and thinking already taken off), or None; never raises."""
        raise NotImplementedError

    def write(self, answer: Any, example: Example) -> str:
        """The inverse of ``parse``: an answer as a model should write it."""
        raise NotImplementedError

    def check(self, example: Example) -> None:
        """Raise ValueError, saying what is wrong, if the example's gold answer has a wrong form."""

    def draw(self, image: Image.Image, answer: Any, example: Example, color: str) -> Image.Image:
        """A copy of the example's first image with the answer drawn on it."""
        return image

    # What the base makes of it.

    def prompt(self, example: Example) -> str:
        """The user's whole message: the question and how to answer it."""
        where = "inside <answer> </answer>" if self.tags else "after it"
        if self.thinking:
            how = f"First think inside <think> </think>, then give only the final answer {where}."
        elif self.tags:
            how = "Give only the final answer inside <answer> </answer>."
        else:
            return self.question(example)
        return f"{self.question(example)} {how}"

    def gold(self, example: Example) -> str:
        """A completion that must score 1.0: the gold answer as the prompt asks for it."""
        text = self.write(self.gold_answer(example), example)
        text = f"<answer>{text}</answer>" if self.tags else text
        return f"<think></think>{text}" if self.thinking else text

    def gold_answer(self, example: Example) -> Any:
        """The gold answer in the form that ``parse`` returns."""
        return example.answer

    def read(self, text: str, example: Example) -> Any | None:
        """The answer in a whole completion, or None where it holds no answer or no single one."""
        inner = answer_text(text, tags=self.tags)
        return None if inner is None else self.parse(inner, example)

    def score(self, text: str, example: Example) -> Score:
        """Rewards and metrics of one completion; a rule that raises is reported, not raised."""
        answer = self.read(text, example)
        failures: dict[str, str] = {}
        values: dict[str, dict[str, float | None]] = {"reward": {}, "metric": {}}
        for name, rule in self._all_rules().items():
            if answer is None:
                values[rule.kind][name] = rule.without_answer
                continue
            arguments = (answer, example, text) if rule.sees_text else (answer, example)
            try:
                values[rule.kind][name] = _finite(getattr(self, name)(*arguments))
            except Exception:  # a user's reward may raise anything; the run must go on
                values[rule.kind][name] = None
                failures[name] = traceback.format_exc()
        rewards = values["reward"]
        total = 0.0
        for name, weight in self.reward_weights().items():
            value = rewards[name]
            if value is None and weight:
                return Score(answer, rewards, None, values["metric"], failures)
            total += weight * (value or 0.0)
        return Score(answer, rewards, total, values["metric"], failures)

    def reward_weights(self) -> dict[str, float]:
        """Every reward's weight by name."""
        return {
            name: self.weights.get(name, rule.weight) for name, rule in self.rules("reward").items()
        }

    @classmethod
    def rules(cls, kind: str) -> dict[str, Rule]:
        """The rewards (``kind="reward"``) or metrics (``"metric"``) of the task by name."""
        return {name: rule for name, rule in cls._all_rules().items() if rule.kind == kind}

    @classmethod
    def _all_rules(cls) -> dict[str, Rule]:
        found: dict[str, Rule] = {}
        for base in reversed(cls.__mro__):
            for name, member in vars(base).items():
                if isinstance(rule := getattr(member, "rule", None), Rule):
                    found[name] = rule
        return found


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, which is no finite number")
    return number
