"""Groups that fail are sampled anew as revisions of one of their answers.

After GroupRevision (Liu et al., arXiv:2605.15951; its abstract was read, its code is not public):
where all answers of a group fail, the policy sees one of them again, and the group consists of its
revisions. The improvement over that answer is the reward; it differs from a revision's own reward
by a number that the group's baseline takes away again. The paper also shapes rewards and advantages
by the improvement, which is not done here.

The answer that is revised is a trunk, sampled and passed once for the whole group. Its tokens have
the advantage 0: they are the same in all revisions, so no reward tells them apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from pydantic import Field

from vlm_grpo.config.methods import MethodSettings
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.training.methods import Groups, Method, Metrics, Run
from vlm_grpo.training.step_batch import KeptGroup, Rollout, StepAdvantages
from vlm_grpo.types import Group, Observed


class RevisionSettings(MethodSettings):
    """Revisions of one answer in place of groups that fail."""

    below: float = Field(default=0.5)
    """A group is revised if the total rewards of all its answers are below this."""
    text: str = Field(
        default="This answer is wrong. Look again and answer the question.", min_length=1
    )
    """What the user replies to the answer."""


class Revision(Method):
    """Revisions of the best answer of a group whose answers all fail."""

    name, refused = "revision", ("rollout.noise", "objective.replay", "data.curriculum")
    own: RevisionSettings

    def start(self, run: Run) -> None:
        super().start(run)
        if all(run.task.resolve(example)[1].environment for example in run.stream.examples):
            raise UserError("methods: revision has no effect on episodes of an environment")
        shown = run.policy.prompts.chat.observe(self.own.text, "user")
        if self.own.text not in shown:
            raise UserError("methods: revision: the chat template takes no text behind an answer")
        self.first = dict[str, float]()  # reward of the answer that is revised, by example

    def revise(self, group: Group) -> tuple[int, Observed] | None:
        rewards = [score.total for score in group.scores if score.total is not None]
        if group.prompt.start is not None or len(rewards) < len(group.scores):
            return None
        ended = [n for n, c in enumerate(group.completions) if c.stop != "length"]
        if not ended or max(rewards) >= self.own.below:
            return None
        best = max(ended, key=rewards.__getitem__)
        self.first[group.id] = rewards[best]
        return best, Observed(self.own.text)

    def credit(self, rollout: Rollout, advantages: StepAdvantages) -> StepAdvantages:
        revised = [(group, c) for group in rollout.groups for c in group.completions]
        firsts = [c.trunk_length if is_revised(group) else 0 for group, c in revised]
        if not any(firsts):
            return advantages
        layout, tokens = rollout.layout, advantages.tokens
        if tokens is None:
            tokens = advantages.own.repeat_interleave(torch.from_numpy(layout.lengths))
        tokens = tokens.clone()
        for part, first in zip(layout.split(tokens), firsts, strict=True):
            part[:first] = 0
        return replace(advantages, tokens=tokens)

    def observe(self, step: int, task: Task, groups: Groups) -> list[float | None]:
        """Return the mean improvement of each group; None: it is not revised."""
        found = []
        for group in groups.values():
            rewards = [score.total for score in group.scores if score.total is not None]
            is_known = is_revised(group) and rewards
            found.append(fmean(rewards) - self.first[group.id] if is_known else None)
        self.first.clear()
        return found

    def learn(self, step: int, observed: list[Any], recalled: Sequence[KeptGroup]) -> Metrics:
        known = [value for value in observed if value is not None]
        metrics = {f"{self.name}/share": len(known) / len(observed)} if observed else {}
        return metrics | ({f"{self.name}/improvement": fmean(known)} if known else {})


def is_revised(group: Group) -> bool:
    """Return whether a group has revisions of one answer."""
    return group.prompt.start is None and any(c.observations for c in group.completions)
