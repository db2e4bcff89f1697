"""The end of a run in which a reward fails on every completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.rewards import Rule
from vlm_grpo.types import Example, Score

ENOUGH = 4
"""Failures in a row, without a success, after which a reward counts as failing on everything, even
if most completions had no answer for it."""


class FailureGuard:
    """A check that every reward with a weight works on some completion.

    A failed reward makes its completion unscorable. If it fails on all of them, nothing is learned
    from the answers, although every metric is finite.
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
        """Check the scores of this rank's completions, of a round of sampling or of an evaluation.

        ``add_ranks`` returns the sums of some numbers over all ranks.

        Raises:
            UserError: on all ranks, if a reward failed on every completion that it was called for:
                on all of them, or on ``ENOUGH`` since it last worked.
        """
        rules = task.reward_rules()
        names = [name for name, weight in task.reward_weights().items() if weight]
        counts = [len(scores)]
        for name in names:
            values = [
                score.rewards[name]
                for score in scores
                if name in score.rewards and _was_called(rules[name], score)
            ]
            counts += [len(values), values.count(None)]
        total, *counts = add_ranks(counts)
        for name, called, failed in zip(names, counts[::2], counts[1::2], strict=True):
            if failed < called:
                self._in_a_row[name] = 0
                continue
            self._in_a_row[name] += failed
            if failed and (failed == total or self._in_a_row[name] >= ENOUGH):
                raise UserError(_describe(name, self._in_a_row[name], scores, examples))


def _was_called(rule: Rule, score: Score) -> bool:
    return score.answer is not None or not rule.needs_answer or "parse" in score.failures


def _describe(name: str, count: int, scores: Sequence[Score], examples: Sequence[Example]) -> str:
    first = next(
        (
            f", here first on example {example.id}: {trace.strip().splitlines()[-1]}"
            for score, example in zip(scores, examples, strict=True)
            if (trace := score.failures.get(name) or score.failures.get("parse"))
        ),
        ", all of other processes",
    )
    return (
        f"the reward {name} failed on every completion ({count} in a row){first}\n"
        "fix the reward, or what it depends on, and start the command again; a run that has "
        "checkpoints continues with resume=true"
    )
