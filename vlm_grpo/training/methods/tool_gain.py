"""The worth of tools in training: a part of each group of episodes is sampled without them.

All episodes of a group have the same prompt, and so the same pass over it; the last of them read a
refusal in place of each result. Episodes that call nothing are distributed alike in both parts, so
the difference of the parts' mean rewards is the share of episodes that call, times what results
are worth to them. Each part is its own baseline, and the first call gets the difference besides:
for ``coef=1`` its baseline is the mean without tools, a counterfactual one as in COMA (Foerster et
al., arXiv:1705.08926). ``docs/objective.md`` says in which way this is no gradient of the reward.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from vlm_grpo.config.methods import MethodSettings
from vlm_grpo.task import Task
from vlm_grpo.training.methods import Groups, Method, Metrics
from vlm_grpo.training.step_batch import KeptGroup, Rollout, StepAdvantages, is_masked
from vlm_grpo.types import Group


class ToolGainSettings(MethodSettings):
    """Episodes without tools in each group, and the advantage of the first call."""

    share: float = Field(default=0.25, gt=0, lt=1)
    """Share of a group's episodes whose calls are refused, rounded to whole first turns with
    ``rollout.forks``; at least one episode, and one with tools."""
    coef: float = Field(default=1.0, ge=0)
    """Factor of the difference of the parts' mean advantages in that of a first call; 0: it is
    measured only, and each part is its own baseline."""


class ToolGain(Method):
    """The difference that tools make to a group's rewards as the advantage of the first call."""

    name = "tool_gain"
    own: ToolGainSettings

    def count_refused(self, size: int) -> int:
        forks = self.run.settings.rollout.forks
        turns = size // forks
        return forks * min(max(1, int(self.own.share * turns + 0.5)), turns - 1)

    def credit(self, rollout: Rollout, advantages: StepAdvantages) -> StepAdvantages:
        if rollout.author is not None:
            return advantages
        tokens, start = list[Tensor](), 0
        for group in rollout.groups:
            size = len(group.completions)
            values, start = advantages.own[start : start + size], start + size
            lengths = [len(c.token_ids) for c in group.completions]
            first = [c.trunk_length if c.observations else 0 for c in group.completions]
            counted = torch.tensor(self._find_counted(group))
            refused = 0 if group.prompt.start is None else self.count_refused(size)
            tokens += credit_calls(values, counted, first, lengths, refused, self.own.coef)
        if not tokens:
            return advantages
        means = torch.stack([part.mean() if len(part) else part.sum() for part in tokens])
        return replace(advantages, own=means, tokens=torch.cat(tokens))

    def _find_counted(self, group: Group) -> list[bool]:
        """Return which episodes are compared: those with a reward that are not cut and masked."""
        objective = self.run.settings.objective
        pairs = zip(group.completions, group.scores, strict=True)
        return [s.total is not None and not is_masked(c, objective) for c, s in pairs]

    def observe(self, step: int, task: Task, groups: Groups) -> list[tuple[float, float]]:
        """Return the mean rewards with and without tools of each group that has both."""
        found = []
        for group in groups.values():
            if group.prompt.start is None:
                continue
            split = len(group.scores) - self.count_refused(len(group.scores))
            counted = zip(self._find_counted(group), group.scores, strict=True)
            rewards = [score.total if is_counted else None for is_counted, score in counted]
            parts = [
                [r for r in own if r is not None] for own in (rewards[:split], rewards[split:])
            ]
            if all(parts):
                found.append((fmean(parts[0]), fmean(parts[1])))
        return found

    def learn(self, step: int, observed: list[Any], recalled: Sequence[KeptGroup]) -> Metrics:
        if not observed:
            return {}
        given, refused = map(fmean, zip(*observed, strict=True))
        means = {"difference": given - refused, "with": given, "without": refused}
        return {f"{self.name}/{name}": value for name, value in means.items()}


def credit_calls(
    advantages: Tensor,
    counted: Tensor,
    first: Sequence[int],
    lengths: Sequence[int],
    refused: int,
    coef: float,
) -> list[Tensor]:
    """Return the advantages of the tokens of each of a group's G completions.

    Args:
        advantages: (G,) of the whole group.
        counted: (G,) False for a completion without a reward, or one that the loss leaves out.
        first: number of tokens up to the end of the first call of each; 0: it calls nothing.
        lengths: number of tokens of each.
        refused: number of the last completions, whose calls were refused.
    """
    values = advantages.double()  # means of equal numbers are these numbers
    without = torch.arange(len(values)) >= len(values) - refused
    parts = [values[counted & part] for part in (~without, without)]
    gain = values.new_zeros(())
    if all(map(len, parts)):
        means = [part.mean() for part in parts]
        values, gain = values - torch.where(without, means[1], means[0]), means[0] - means[1]
    tokens = []
    for row, (value, call, length) in enumerate(zip(values * counted, first, lengths, strict=True)):
        own = value.repeat(length)
        own[:call] = 0.0 if without[row] or not counted[row] else value + coef * gain
        tokens.append(own.to(advantages.dtype))
    return tokens
