"""Supervised steps, whose completions are targets that are written instead of sampled."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

from vlm_grpo.config.methods import WarmStartSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.task.episodes import EnvironmentRunner, demonstrate
from vlm_grpo.training.methods import Method, Run
from vlm_grpo.training.objective.losses import LossInputs
from vlm_grpo.training.objective.token_batch import TokenBatch
from vlm_grpo.training.step_batch import Rollout
from vlm_grpo.types import (
    TARGET_COLUMN,
    Completion,
    EpisodeStart,
    EpisodeTurn,
    Example,
    Group,
    Observation,
    Prompt,
    Score,
)

_ANSWER = "an answer 7"


class WarmStart(Method):
    """Steps of cross-entropy on gold answers before the first rollout, or in place of all."""

    name, block, is_alone = "warm_start", "warm_start", True
    own: WarmStartSettings
    writer: TargetWriter

    def start(self, run: Run) -> None:
        super().start(run)
        self.writer = TargetWriter(run.policy, run.settings)

    def check_examples(
        self, policy: Policy, task: Task, settings: Settings
    ) -> Callable[[Example], object]:
        writer = TargetWriter(policy, settings)
        return lambda example: writer.write(example, task)

    def writes(self, step: int) -> bool:
        return self.run.settings.is_supervised(step)

    def write(self, prompts: Sequence[Prompt], task: Task) -> list[Group]:
        groups = []
        for prompt in prompts:
            target = self.writer.write(prompt.example, task, prompt.start)
            groups.append(Group(prompt, (target,), (_read(target.text, prompt.example, task),)))
        return groups

    def begin(self, rollout: Rollout, scheduler: Any) -> None:
        """Start the first sampled step like a new run, without a state of the optimizer."""
        if rollout.step == self.run.settings.supervised_steps:
            self.run.strategy.optimizer.state.clear()
            while scheduler.last_epoch < rollout.step:  # skipped updates did not advance it
                scheduler.step()

    def term(self, inputs: LossInputs) -> Tensor:
        return -inputs.batch.logprobs

    def metrics(self, batch: TokenBatch, old: Tensor) -> dict[str, Tensor]:
        """Return which targets are the policy's likeliest token, as in TRL."""
        return {} if batch.is_top is None else {"mean_token_accuracy": batch.is_top}


class TargetWriter:
    """A writer of targets: the text of a row's own ``completion``, or the task's gold answer.

    A target ends with the token that ends an answer in the model's chat template.
    """

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.prompts, self.tokenizer = policy.prompts, policy.tokenizer
        self.runner = EnvironmentRunner(settings.rollout.reward_workers)
        self.rollout, self.end = settings.rollout, find_end_token(policy)

    def write(self, example: Example, task: Task, start: EpisodeStart | None = None) -> Completion:
        """Write the target of an example, behind the demonstration of an episode that starts;
        ``UserError``: the sampler could not generate it."""
        turns, before, seen = list[EpisodeTurn](), list[int](), list[Observation]()
        if start is not None:
            turns = demonstrate(self.runner, start, task.resolve(example)[1], example)
        for turn in turns:
            before += self.tokenizer(turn.text, add_special_tokens=False)["input_ids"]
            seen.append(Observation(len(before), self.prompts.observe(turn.observed)))  # type: ignore[arg-type]
        text = self._get_text(example, task)
        if self.prompts.remove_control_tokens(text) != text:
            raise UserError(
                f"{example.name}: its target {text!r:.80} has the text of a control token of the "
                "model: remove or rewrite it"
            )
        own = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        token_ids = (*before, *own, self.end)
        length, rollout = len(token_ids), self.rollout
        if length > rollout.max_completion_length:
            raise UserError(
                f"{example.name}: its target {text!r:.80} has {length} tokens with the end token, "
                f"more than rollout.max_completion_length={rollout.max_completion_length}: raise it"
            )
        if length <= rollout.min_new_tokens:
            raise UserError(
                f"{example.name}: its target {text!r:.80} ends after {length - 1} tokens, before "
                f"rollout.min_new_tokens={rollout.min_new_tokens}: lower it"
            )
        # Only this completion can be written: each of its tokens has probability 1.
        turns += [EpisodeTurn(text)] if turns else []
        more = {"observations": tuple(seen), "turns": tuple(turns)}
        return Completion(token_ids, (0.0,) * length, text, "eos", **more)  # type: ignore[arg-type]

    def _get_text(self, example: Example, task: Task) -> str:
        text = example.meta.get(TARGET_COLUMN)
        source = f"its column {TARGET_COLUMN}"
        if text is None:
            source = "the task's gold answer"
            try:
                text = task.gold(example)
            except FAILURES as error:  # a user's method may raise anything
                reason = f"{type(error).__name__}: {error}"
                raise UserError(
                    f"{example.name}: the task cannot write its gold answer: {reason}"
                ) from error
        if not isinstance(text, str) or not text:
            raise UserError(f"{example.name}: {source} must be text, not {text!r:.80}")
        return text


def find_end_token(policy: Policy) -> int:
    """Return the end token that follows an answer in the chat template; if none does, the first."""
    ends = policy.distribution.eos
    part = {"type": "text", "text": _ANSWER}
    contents: tuple[Any, ...] = (_ANSWER, [part])
    for content in contents:
        turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": content}]
        try:
            text = policy.prompts.chat.write(turns, {}, add_generation_prompt=False)
        except TemplateError:  # it takes the other form
            continue
        _, is_written, after = text.rpartition(_ANSWER)
        tokens = policy.tokenizer(after, add_special_tokens=False)["input_ids"]
        found = [token for token in tokens if token in ends]
        if is_written and found:
            return found[0]
    return ends[0]


def _read(text: str, example: Example, task: Task) -> Score:
    try:
        return Score(task.read(text, example), {}, None, {})
    except FAILURES:  # a user's parser may raise anything
        return Score(None, {}, None, {}, {"parse": traceback.format_exc()})
