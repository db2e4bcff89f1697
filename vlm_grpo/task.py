"""The base of every task plugin: prompt, parser, rewards, metrics, gold answer, drawing.

A task is one class in one file. Options are annotated class attributes, set where the task is
loaded (``load_task("counting", tags=True)``), so a subclass reads like a small dataclass::

    class Counting(Task):
        '''Count the named objects in one image.'''

        primary_metric = "exact"

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Self, dataclass_transform

from PIL import Image

from vlm_grpo.coordinates import ORIGINAL, CoordinateFrame
from vlm_grpo.parsing import extract_answer
from vlm_grpo.scoring import repeated_share
from vlm_grpo.types import Example, Score
from vlm_grpo.utils.timing import CallTimeout

_ARGUMENTS = ("answer", "example", "text", "tokens")
FAILURES = (Exception, SystemExit, CallTimeout)
"""What a user's parser or rule may raise, none of which may stop a run."""


@dataclass(frozen=True)
class Rule:
    """A reward or a metric: a method of a task.

    Attributes:
        kind: "reward" or "metric".
        weight: a reward's share in the total.
        without_answer: its value where the completion holds no answer.
        sees_text: the method takes the whole completion too.
        sees_tokens: and the number of its tokens.
        needs_answer: it is called only where the completion holds an answer.
        optional: a reward that is left out unless the task's ``weights`` name it.
    """

    kind: str
    weight: float
    without_answer: float | None
    sees_text: bool
    sees_tokens: bool
    needs_answer: bool = True
    optional: bool = False


def _rule(kind: str, weight: float, without_answer: float | None, **more: bool) -> Callable:
    def decorate(method: Callable) -> Callable:
        arguments = tuple(inspect.signature(method).parameters)[1:]
        if len(arguments) < 2 or arguments != _ARGUMENTS[: len(arguments)]:
            raise TypeError(
                f"{kind} {method.__qualname__}{arguments} must take (self, answer, example), "
                "then text and tokens if it needs them"
            )
        sees = {"sees_text": "text" in arguments, "sees_tokens": "tokens" in arguments}
        method.rule = Rule(kind, weight, without_answer, **sees, **more)  # type: ignore[attr-defined]
        return method

    return decorate


def reward(weight: float = 1.0, *, needs_answer: bool = True, optional: bool = False) -> Callable:
    """Mark a method ``(self, answer, example[, text[, tokens]])`` of a task as a reward.

    ``tokens`` is how many the completion has. Where only its text is known, as in evaluation and
    in scoring from a file, a reward that asks for them is left out.

    Args:
        weight: its share in the total reward; 0 logs it without training on it.
        needs_answer: call it only where the completion holds an answer; without one it is 0.
            False, with ``answer`` None there, is for penalties: were a missing answer spared
            them, giving none would pay.
        optional: leave it out unless the task's ``weights`` name it.
    """
    return _rule("reward", weight, 0.0, needs_answer=needs_answer, optional=optional)


def metric(without_answer: float | None = 0.0) -> Callable:
    """Mark a method ``(self, answer, example[, text[, tokens]])`` of a task as a metric.

    Args:
        without_answer: the metric's value where the completion holds no answer; None leaves
            such completions out of its mean.
    """
    return _rule("metric", 0.0, without_answer)


def _call_directly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


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
        progress: how far the training has come, 0 to 1; set by ``at``.
        length_budget: characters of a completion that the ``length`` reward leaves free, at
            least 1.
        overlong_cache: tokens before the limit over which the ``overlong`` reward falls; it must
            be given where ``weights`` name that reward.
        token_limit: tokens at which a completion is cut off; the trainer sets it.
    """

    primary_metric: ClassVar[str]
    """Name of the reward or metric by which models are compared."""
    lower_is_better: ClassVar[bool] = False
    """The primary metric is an error: the best checkpoint is the one where it is least."""

    tags: bool = False
    thinking: bool = False
    frame: CoordinateFrame = ORIGINAL
    weights: Mapping[str, float] = field(default_factory=dict)
    progress: float = 0.0
    length_budget: int = 1000
    overlong_cache: int = 0
    token_limit: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        known = [*self.rules("reward"), *self.rules("optional")]
        unknown = sorted(set(self.weights) - set(known))
        if unknown:
            raise ValueError(
                f"task {type(self).__name__} has no reward {', '.join(unknown)}; "
                f"it has {', '.join(known)}"
            )
        if self.length_budget < 1:
            raise ValueError(f"length_budget is {self.length_budget}; it must be at least 1")
        if self.weights.get("overlong") and self.overlong_cache < 1:
            raise ValueError(
                "the reward overlong needs overlong_cache: the tokens before the length limit over "
                "which it falls from 0 to -1, as a quarter of rollout.max_completion_length"
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

    def corpus_metrics(
        self, answers: Sequence[Any | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Metrics of a whole set that are no mean over its completions, by name.

        Args:
            answers: what ``read`` returned for each completion, one for each example.
            examples: the rows, in the same order; a row sampled several times stands as often.
        """
        return {}

    # Rewards that a recipe can add to any task by naming them in ``weights``.

    @reward(weight=0.0, optional=True)
    def format(self, answer: Any, example: Example, text: str) -> float:
        """1 where the completion is what the prompt asked for and not a word more.

        Paid only where the answer parses; give it a small weight.
        """
        _, thinking, rest = text.rpartition("</think>")
        rest = rest.strip()
        enclosed = rest.startswith("<answer>") and rest.endswith("</answer>")
        return float(bool(thinking) == self.thinking and (enclosed or not self.tags))

    @reward(weight=0.0, optional=True)
    def thought(self, answer: Any, example: Example, text: str) -> float:
        """1 where there is thinking and it was asked for, or neither; paid only with an answer."""
        thinking = text.rpartition("</think>")[0].replace("<think>", "").strip()
        return float(bool(thinking) == self.thinking)

    @reward(weight=0.0, optional=True, needs_answer=False)
    def length(self, answer: Any | None, example: Example, text: str) -> float:
        """A penalty: 0 up to ``length_budget`` characters, falling to −1 at twice as many."""
        return 0.0 - min(1.0, max(0.0, len(text) / self.length_budget - 1.0))

    @reward(weight=0.0, optional=True, needs_answer=False)
    def overlong(self, answer: Any | None, example: Example, text: str, tokens: int) -> float:
        """A penalty in [−1, 0]: 0 until ``overlong_cache`` tokens are left, −1 at the limit.

        The limit is ``rollout.max_completion_length`` (DAPO, arXiv:2503.14476, eq. 13).
        """
        free = self.token_limit - self.overlong_cache
        return 0.0 - min(1.0, max(0.0, (tokens - free) / self.overlong_cache))

    @reward(weight=0.0, optional=True, needs_answer=False)
    def repetition(self, answer: Any | None, example: Example, text: str) -> float:
        """A penalty in [−1, 0]: minus the share of word 6-grams that came before."""
        return 0.0 - repeated_share(text)

    # What the base makes of it.

    def at(self, progress: float) -> Self:
        """The same task at another point of the training, 0 to 1, for rewards that get stricter."""
        return replace(self, progress=progress)

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
        """A completion that must earn ``gold_reward``: the gold answer as the prompt asks."""
        text = self.write(self.gold_answer(example), example)
        text = f"<answer>{text}</answer>" if self.tags else text
        return f"<think>Look at the image.</think>{text}" if self.thinking else text

    def gold_reward(self, example: Example) -> float:
        """The least that each reward gives the gold completion (a penalty gives it 0).

        It is 1.0 unless writing the answer rounds it, as whole units of a frame round a box.
        """
        return 1.0

    def gold_answer(self, example: Example) -> Any:
        """The gold answer in the form that ``parse`` returns."""
        return example.answer

    def read(self, text: str, example: Example) -> Any | None:
        """The answer in a whole completion, or None where it holds no answer or no single one."""
        inner = extract_answer(text, tags=self.tags)
        return None if inner is None else self.parse(inner, example)

    def score(
        self,
        text: str,
        example: Example,
        tokens: int | None = None,
        call: Callable[..., Any] = _call_directly,
    ) -> Score:
        """Rewards and metrics of one completion; what fails is reported, not raised.

        Args:
            text: the whole completion.
            example: the row that it answers.
            tokens: how many tokens it has; None where that is not known, which leaves out the
                rules that ask for it.
            call: calls the parser and each rule, ``call(function, *arguments)``, and may raise
                ``CallTimeout``.
        """
        try:
            answer = call(self.read, text, example)
        except FAILURES:
            return self.unreadable(traceback.format_exc(), tokens)
        values: dict[str, float | None] = {}
        failures: dict[str, str] = {}
        for name in self.applicable_rules(tokens):
            try:
                values[name] = self.apply(name, (answer, example, text, tokens), call)
            except FAILURES:
                values[name] = None
                failures[name] = traceback.format_exc()
        return self.tally(answer, values, failures)

    def apply(
        self,
        name: str,
        arguments: tuple[Any | None, Example, str, int | None],
        call: Callable[..., Any] = _call_directly,
    ) -> float | None:
        """The value of one reward or metric; it may raise whatever a user's rule raises.

        Args:
            name: the rule.
            arguments: the answer, and ``example``, ``text`` and ``tokens`` as for ``score``.
            call: as for ``score``.
        """
        rule = self._all_rules()[name]
        if arguments[0] is None and rule.needs_answer:
            return rule.without_answer
        taken = arguments[: 2 + rule.sees_text + rule.sees_tokens]
        return _finite(call(getattr(self, name), *taken))

    def tally(
        self, answer: Any | None, values: Mapping[str, float | None], failures: Mapping[str, str]
    ) -> Score:
        """The score that the values of all applicable rules come to; None marks one that failed."""
        weights = {name: w for name, w in self.reward_weights().items() if name in values}
        rewards = {name: values[name] for name in weights}
        metrics = {name: value for name, value in values.items() if name not in weights}
        total: float | None = 0.0
        for name, weight in weights.items():
            value = rewards[name]
            if value is None and weight:
                total = None
                break
            total += weight * (value or 0.0)
        return Score(answer, rewards, total, metrics, failures)

    def unreadable(self, failure: str, tokens: int | None = None) -> Score:
        """The score of a completion on which the parser failed, with its traceback."""
        values = dict.fromkeys(self.applicable_rules(tokens))
        return replace(self.tally(None, values, {"parse": failure}), total=None)

    def applicable_rules(self, tokens: int | None) -> list[str]:
        """The metrics and the rewards in use, less those that need an unknown token count."""
        weights = self.reward_weights()
        return [
            name
            for name, rule in self._all_rules().items()
            if (rule.kind == "metric" or name in weights)
            and not (rule.sees_tokens and tokens is None)
        ]

    def reward_weights(self) -> dict[str, float]:
        """The weight by name of every reward in use."""
        return {
            name: self.weights.get(name, rule.weight)
            for name, rule in self._all_rules().items()
            if rule.kind == "reward" and (name in self.weights or not rule.optional)
        }

    @classmethod
    def rules(cls, kind: str) -> dict[str, Rule]:
        """The rewards (``kind="reward"``) or metrics (``"metric"``) of the task by name.

        ``kind="optional"``: the rewards that are left out unless ``weights`` names them.
        """
        return {
            name: rule
            for name, rule in cls._all_rules().items()
            if kind == ("optional" if rule.optional else rule.kind)
        }

    @classmethod
    @cache
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
