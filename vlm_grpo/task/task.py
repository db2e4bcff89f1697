"""The base class of tasks: prompt, parser, rewards, metrics, gold answer and drawing.

A task is one class in one file. Its options are annotated class attributes, as in a dataclass,
and are set when the task is loaded (``load_task("counting", tags=True)``)::

    class Counting(Task):
        primary_metric = "exact"

        def parse(self, text, example):
            return parse_integer(text)

        def write(self, answer, example):
            return str(answer)

        @reward(weight=1.0)
        def exact(self, answer, example):
            return float(answer == example.answer)

Its rules are the methods marked as rewards and metrics. A batch rule sees many completions at once:
``@reward(batch=True)`` marks a method ``(self, batch)`` that returns one value per completion.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, dataclass_transform

from PIL import Image

from vlm_grpo.task.coordinates import ORIGINAL, Box, CoordinateFrame, gold_boxes
from vlm_grpo.task.parsing import extract_answer
from vlm_grpo.task.repetition import repeated_share
from vlm_grpo.task.rewards import (
    FAILURES,
    Outcome,
    Rule,
    Schedule,
    attempt,
    call_batch_rule,
    check_schedule,
    find_rules,
    get_scheduled,
    reward,
    stay_in_folder,
    to_finite,
)
from vlm_grpo.types import Batch, Candidate, EpisodeTurn, Example, ImageRef, LabeledBoxes, Score
from vlm_grpo.utils.chat import THINK_TAGS, ThinkingTags


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


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Task:
    """A visual task whose answers a rule can check.

    A subclass defines ``parse``, ``write`` and at least one ``@reward``; everything else has a
    default. Rewards, metrics and options must not have the names of attributes of this class.
    """

    primary_metric: ClassVar[str]
    """Name of the reward or metric that selects the best checkpoint and is reported first."""
    lower_is_better: ClassVar[bool] = False
    """True if the primary metric is an error."""
    may_change: ClassVar[tuple[str, ...]] = ()
    """Options that do not affect the results, which a resumed run may change."""

    tags: bool = False  #: request ``<answer>…</answer>`` and parse only the text inside it
    thinking: bool = False  #: request ``<think>…</think>`` before the answer; it is not scored
    instruction: str | None = None  #: sentence after the question that says how to answer
    frame: CoordinateFrame = ORIGINAL  #: coordinate frame of boxes; set from the model
    thinking_tags: ThinkingTags = THINK_TAGS  #: set from the model
    #: reward weights by name, which override those in the code; 0 disables a reward. A weight may
    #: be a schedule: pairs of a progress and a weight
    weights: Mapping[str, Schedule] = field(default_factory=dict)
    progress: float = 0.0  #: progress of the training, 0 to 1; set by ``with_progress``
    length_budget: int = 1000  #: characters without a penalty of the ``length`` reward, at least 1
    #: number of tokens before the limit over which the ``overlong`` reward falls; required if
    #: ``weights`` name that reward
    overlong_cache: int = 0
    token_limit: int = 0  #: maximum number of tokens of a completion; set by the trainer
    #: tools that the model may call before it answers: the name of an environment, the path of its
    #: ``.py`` file, or a mapping of ``name`` and the environment's options. None: there are none
    environment: Any = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_names(cls, Task)
        if "headline" in vars(cls):
            raise TypeError(f"{cls.__qualname__}.headline is called primary_metric now: rename it")
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        if self.environment is not None and self.environment.frame != self.frame:
            object.__setattr__(self, "environment", self.environment.adapt(self.frame))
        known = self.reward_rules()
        if unknown := sorted(set(self.weights) - set(known)):
            raise ValueError(
                f"task {type(self).__name__} has no reward {', '.join(unknown)}; "
                f"it has {', '.join(known)}"
            )
        for name, weight in self.weights.items():
            check_schedule(name, weight)
        if self.length_budget < 1:
            raise ValueError(f"length_budget is {self.length_budget}; it must be at least 1")
        if self.weights.get("overlong") and self.overlong_cache < 1:
            raise ValueError(
                "the reward overlong needs overlong_cache: the number of tokens before the length "
                "limit over which it falls from 0 to -1, such as a quarter of "
                "rollout.max_completion_length"
            )

    # Methods that a subclass defines or overrides.

    def question(self, example: Example) -> str:
        """Return the question about the example, without instructions on how to answer."""
        return example.question

    def parse(self, text: str, example: Example) -> Any | None:
        """Return the answer in a text without tags and thinking, or None; must not raise."""
        raise NotImplementedError

    def write(self, answer: Any, example: Example) -> str:
        """Return the text that a model should write for an answer; the inverse of ``parse``."""
        raise NotImplementedError

    def pose(self, example: Example) -> Example:
        """Return the example that is asked about a row; ``ValueError``: none can be made of it.

        Where a task overrides it, to ask about the images alone, rows need no question and answer.
        """
        return example

    def find_repeat(self, example: Example, seen: dict[Any, Any]) -> str | None:
        """Return the id of an earlier example that this one repeats, or None; ``seen``, at first
        empty, is the task's memory of the examples of a source."""
        return None

    def check(self, example: Example) -> None:
        """Raise ValueError, naming the problem, if the example's gold answer is malformed."""

    def ask_about(self, objects: LabeledBoxes) -> Iterable[tuple[str, Any]]:
        """Return questions and gold answers about an image of a detection dataset."""
        raise ValueError(f"{type(self).__name__} cannot ask about labeled boxes: define ask_about")

    def draw(self, image: Image.Image, answer: Any, example: Example, color: str) -> Image.Image:
        """Return a copy of the example's ``target_image`` with the answer drawn on it."""
        return image

    def gold_boxes(self, example: Example) -> tuple[Box, ...]:
        """Return where the ``target_image`` shows what is asked about: the boxes of the gold
        answer, or of the row's column ``boxes``, in pixels; (): not known.
        """
        for row in (example.answer, example.meta):
            with suppress(ValueError):
                return gold_boxes(row)
        return ()

    def target_image(self, example: Example) -> ImageRef:
        """Return the image that boxes and points refer to; by default the first."""
        return example.images[0]

    def corpus_metrics(
        self, answers: Sequence[Any | None], examples: Sequence[Example]
    ) -> dict[str, float]:
        """Return metrics by name that are not means over completions, such as average precision.

        ``answers`` are what ``read`` returns for completions, ``examples`` what each answers.
        """
        return {}

    @reward(weight=0.0, optional=True)
    def format(self, answer: Any, example: Example, text: str) -> float:
        """Return 1 if the completion has the requested format and no other text, else 0.

        Only completions with an answer earn it. Give it a small weight.
        """
        _, thinking, rest = self.thinking_tags.normalize(text).rpartition("</think>")
        rest = rest.strip()
        enclosed = rest.startswith("<answer>") and rest.endswith("</answer>")
        return float(bool(thinking) == self._must_think and (enclosed or not self.tags))

    @reward(weight=0.0, optional=True)
    def thought(self, answer: Any, example: Example, text: str) -> float:
        """Return 1 if an answer comes with thinking exactly when it was requested, else 0."""
        thinking = self.thinking_tags.normalize(text).rpartition("</think>")[0]
        return float(bool(thinking.replace("<think>", "").strip()) == self._must_think)

    @reward(weight=0.0, optional=True, needs_answer=False)
    def length(self, answer: Any | None, example: Example, text: str) -> float:
        """Return a penalty: 0 up to ``length_budget`` characters, falling to −1 at twice that."""
        return 0.0 - min(1.0, max(0.0, len(text) / self.length_budget - 1.0))

    @reward(weight=0.0, optional=True, needs_answer=False)
    def overlong(self, answer: Any | None, example: Example, text: str, tokens: int) -> float:
        """Return a penalty: 0 until ``overlong_cache`` tokens before the limit, −1 at the limit.

        The limit is ``rollout.max_completion_length`` (DAPO, arXiv:2503.14476, eq. 13).
        """
        start = self.token_limit - self.overlong_cache
        return 0.0 - min(1.0, max(0.0, (tokens - start) / self.overlong_cache))

    @reward(weight=0.0, optional=True, needs_answer=False)
    def repetition(self, answer: Any | None, example: Example, text: str) -> float:
        """Return a penalty in [−1, 0]: minus the share of word 6-grams that are repeated."""
        return 0.0 - repeated_share(text)

    def with_progress(self, progress: float) -> Self:
        """Return a copy with another ``progress``, for rewards that depend on it."""
        return replace(self, progress=progress)

    def resolve(self, example: Example) -> tuple[str, Task]:
        """Return the name of the example's source and its task; ("", self) but in a mixture."""
        return "", self

    def prompt(self, example: Example) -> str:
        """Return the user message: the question and the instructions on how to answer."""
        question, how = self.question(example), self.instructions(example)
        if not isinstance(question, str):
            raise TypeError(f"question returned {question!r}, not text")
        return f"{question} {how}" if how else question

    def instructions(self, example: Example) -> str:
        """Return the instructions on how to answer; empty: none."""
        where = "inside <answer> </answer>" if self.tags else "after it"
        how = "Give only the final answer inside <answer> </answer>." if self.tags else ""
        if self.thinking:
            how = f"First think inside <think> </think>, then give only the final answer {where}."
        return " ".join(part for part in (self.instruction, how) if part)

    def gold(self, example: Example) -> str:
        """Return the gold answer as a completion, which must earn ``gold_reward``."""
        text = self.write(self.gold_answer(example), example)
        return self.enclose("Look at the image.", f"<answer>{text}</answer>" if self.tags else text)

    def enclose(self, thinking: str, text: str) -> str:
        """Return a text with a thinking before it, if the model must think."""
        return self.thinking_tags.enclose(thinking, text) if self._must_think else text

    @property
    def _must_think(self) -> bool:
        return self.thinking or self.thinking_tags.is_native

    def gold_reward(self, example: Example) -> float:
        """Return the minimum value of each reward for the gold completion; a penalty must be 0.

        Override it where writing the answer rounds it, as with boxes in integer coordinates.
        """
        return 1.0

    def gold_answer(self, example: Example) -> Any:
        """Return the gold answer in the form that ``parse`` returns."""
        return example.answer

    def read(self, text: str, example: Example) -> Any | None:
        """Return the answer in a completion, or None if it has none or several."""
        inner = extract_answer(self.thinking_tags.normalize(text), tags=self.tags)
        return None if inner is None else self.parse(inner, example)

    def score(
        self,
        text: str,
        example: Example,
        tokens: int | None = None,
        turns: Sequence[EpisodeTurn] = (),
    ) -> Score:
        """Score one completion; failures of rules are reported in the score, not raised.

        Batch rules score it as a batch of one.

        Args:
            tokens: number of its tokens; None: unknown, which leaves out the rules that take it.
            turns: those of its episode.
        """
        candidate = Candidate(None, example, text, tokens, 0, tuple(turns))

        def apply(name: str, chosen: tuple[Candidate, ...]) -> list[Outcome]:
            return call_batch_rule(getattr(self, name), Batch(chosen), operator.call)

        return self.build_scores([candidate], [self.apply_rules(candidate)], apply)[0]

    def apply_rules(
        self,
        candidate: Candidate,
        call: Callable[..., Any] = operator.call,
        only: str | None = None,
    ) -> dict[str, Outcome]:
        """Return the outcome of parsing one completion, as "parse", and of each rule that scores
        it alone, or of ``only`` one; ``call`` calls each and may raise ``CallTimeout``."""
        text, example, tokens = candidate.text, candidate.example, candidate.tokens
        answer, failure = attempt(call, self.read, text, example)
        outcomes: dict[str, Outcome] = {"parse": (answer, failure)}
        arguments = (answer, example, text, tokens)
        episode = replace(candidate, answer=answer, group=0)
        for name, rule in self.applicable_rules(tokens).items():
            if failure is not None or only not in (None, name):
                outcomes[name] = None, None
            elif answer is None and rule.needs_answer:
                outcomes[name] = rule.without_answer, None
            else:
                given = arguments[: rule.arguments] if rule.arguments > 1 else (episode,)
                owner = self if name in find_rules(type(self)) else self.environment
                chosen = getattr(owner, name), *given
                outcomes[name] = attempt(lambda chosen=chosen: to_finite(call(*chosen)))
        return outcomes

    def build_scores(
        self,
        candidates: Sequence[Candidate],
        outcomes: Sequence[dict[str, Outcome]],
        apply: Callable[[str, tuple[Candidate, ...]], list[Outcome]],
    ) -> list[Score]:
        """Return the scores of completions from the outcomes of ``apply_rules``, to which
        ``apply`` adds those of a batch rule for some of the completions."""
        parsed = [own["parse"] for own in outcomes]
        for name, rule in self.batch_rules().items():
            judged: list[int] = []
            for place, (answer, failure) in enumerate(parsed):
                outcomes[place][name] = (rule.without_answer if failure is None else None), None
                if failure is None and not (rule.needs_answer and answer is None):
                    judged.append(place)
            batch = tuple(replace(candidates[i], answer=parsed[i][0]) for i in judged)
            found = apply(name, batch) if judged else []
            for place, outcome in zip(judged, found, strict=True):
                outcomes[place][name] = outcome
        scores = []
        for own in outcomes:
            values = {name: value for name, (value, _) in own.items() if name != "parse"}
            failures = {name: failure for name, (_, failure) in own.items() if failure is not None}
            scores.append(self.combine(own["parse"][0], values, failures))
        return scores

    def combine(
        self, answer: Any | None, values: Mapping[str, float | None], failures: Mapping[str, str]
    ) -> Score:
        """Return the score for the values of all rules in use; None marks a failed rule."""
        weights = {name: w for name, w in self.reward_weights().items() if name in values}
        rewards = {name: values[name] for name in weights}
        metrics = {name: value for name, value in values.items() if name not in weights}
        used = [rewards[name] for name, weight in weights.items() if weight]
        is_scorable = "parse" not in failures and None not in used
        total = sum((weight * (rewards[name] or 0.0) for name, weight in weights.items()), 0.0)
        return Score(answer, rewards, total if is_scorable else None, metrics, failures)

    # The rewards and metrics, and which of them are in use.

    @classmethod
    def rules(cls, kind: str) -> dict[str, Rule]:
        """Return the rules by name: "reward", "metric", or "optional" (used if weights name it)."""
        return {
            name: rule
            for name, rule in find_rules(cls).items()
            if kind == ("optional" if rule.optional else rule.kind)
        }

    def reward_rules(self) -> dict[str, Rule]:
        """Return the rules of all rewards by name, also of the optional ones."""
        found = {n: rule for n, rule in self._find_rules().items() if rule.kind == "reward"}
        return dict(sorted(found.items(), key=lambda pair: pair[1].optional))

    def _find_rules(self) -> dict[str, Rule]:
        own, others = find_rules(type(self)), find_rules(type(self.environment))
        if shared := sorted(own.keys() & others.keys()):
            raise ValueError(f"the task and its environment both have {', '.join(shared)}")
        return {**own, **others}

    def without_tools(self) -> Self:
        """Return the task without its environment and the rewards and metrics of that."""
        own = find_rules(type(self))
        weights = {name: weight for name, weight in self.weights.items() if name in own}
        return replace(self, environment=None, weights=weights)

    def reward_weights(self) -> dict[str, float]:
        """Return the weight of each reward in use at the ``progress``, by name."""
        return {
            name: get_scheduled(self.weights.get(name, rule.weight), self.progress)
            for name, rule in self._find_rules().items()
            if rule.kind == "reward" and (name in self.weights or not rule.optional)
        }

    def applicable_rules(self, tokens: int | None) -> dict[str, Rule]:
        """Return the metrics and the rewards in use, by name, without the batch rules and, if
        ``tokens`` is None, those that take it."""
        rules = self._rules_in_use(batch=False).items()
        return {name: rule for name, rule in rules if rule.arguments < 4 or tokens is not None}

    def batch_rules(self) -> dict[str, Rule]:
        """Return the batch metrics and the batch rewards in use, by name."""
        return self._rules_in_use(batch=True)

    def _rules_in_use(self, batch: bool) -> dict[str, Rule]:
        weights = self.reward_weights()
        return {
            name: rule
            for name, rule in self._find_rules().items()
            if rule.batch == batch and (rule.kind == "metric" or name in weights)
        }


def write_prompt(task: Task, example: Example) -> str:
    """Return the task's user message; raises ValueError if the user's ``question`` fails."""
    try:
        with stay_in_folder():
            prompt = task.prompt(example)
    except FAILURES as error:  # a user's method may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the task cannot write its prompt: {reason}") from error
    if not isinstance(prompt, str):
        raise ValueError(f"the task's prompt returned {prompt!r}, not text")
    return prompt


class PlainQuestion(Task):
    """A question without instructions on how to answer; the full output is the answer."""

    primary_metric = "text"

    def parse(self, text: str, example: Example) -> str:
        return text
