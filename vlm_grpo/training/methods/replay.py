"""Training once more on recent groups, in steps in which some groups have equal rewards."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.config.methods import ReplaySettings
from vlm_grpo.task import Task
from vlm_grpo.training.methods import Groups, Method, Metrics
from vlm_grpo.training.step_batch import KeptGroup, TokenLayout, has_spread
from vlm_grpo.types import Completion, Score


class Replay(Method):
    """A buffer of groups with different rewards, the oldest first; each is replayed once at most.

    As RePO's recency-based strategy (Li et al., arXiv:2506.09340), it replays the newest first,
    whose ratios are nearest to 1. There, groups of the step's own prompts are replayed beside all
    prompts; here any group, and only beside groups without a gradient. All ranks hold the same.
    """

    name, block = "replay", "objective.replay"
    own: ReplaySettings

    def __init__(self, own: ReplaySettings) -> None:
        super().__init__(own)
        self.groups: list[KeptGroup] = []

    def recall(self, count: int, step: int) -> list[KeptGroup]:
        oldest = step - self.own.max_age
        return [group for group in reversed(self.groups) if group.step >= oldest][:count]

    def observe(self, step: int, task: Task, groups: Groups) -> list[KeptGroup]:
        weights, objective = task.reward_weights(), self.run.settings.objective
        useful = []
        for index, group in groups.items():
            # The state would not hold what an episode has observed.
            if group.prompt.start is None and has_spread(group, weights, objective):
                # Without what only the metrics of its own step need.
                rows = select_varied([s.total for s in group.scores], self.own.completions)
                stripped = (
                    replace(group.completions[row], entropies=(), version=None) for row in rows
                )
                scores = (replace(group.scores[row], answer=None) for row in rows)
                useful.append(KeptGroup(index, step, tuple(stripped), tuple(scores)))
        return useful

    def learn(self, step: int, observed: list[KeptGroup], recalled: Sequence[KeptGroup]) -> Metrics:
        """Replace the replayed groups by the useful ones; the metrics are of the former."""
        used = {group.index for group in recalled}
        kept = [group for group in self.groups if group.index not in used]
        sampled = sorted(observed, key=lambda group: group.index)
        self.groups = [*kept, *sampled][-self.own.size :]
        ages = [step - group.step for group in recalled]
        metrics: dict[str, float] = {"replay/groups": len(ages)}
        return metrics | ({"replay/age": sum(ages) / len(ages)} if ages else {})

    def state_dict(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        completions = [c for group in self.groups for c in group.completions]
        tokens = [token for c in completions for token in c.token_ids]
        logprobs = [value for c in completions for value in c.logprobs]
        values = [
            {
                "index": group.index,
                "step": group.step,
                "completions": [*map(_serialize, group.completions, group.scores)],
            }
            for group in self.groups
        ]
        return values, {
            "tokens": torch.tensor(tokens, dtype=torch.int64),
            # float64, because the completions hold Python floats.
            "logprobs": torch.tensor(logprobs, dtype=torch.float64),
        }

    def load_state_dict(
        self, values: list[dict[str, Any]] | None, tensors: Mapping[str, Tensor]
    ) -> None:
        if values is None:
            return
        rows = [row for group in values for row in group["completions"]]
        layout = TokenLayout.of([row["tokens"] for row in rows])
        parts = zip(layout.split(tensors["tokens"]), layout.split(tensors["logprobs"]), strict=True)
        restored = iter([_restore(row, *part) for row, part in zip(rows, parts, strict=True)])
        groups = []
        for group in values:
            completions, scores = zip(*(next(restored) for _ in group["completions"]), strict=True)
            groups.append(KeptGroup(group["index"], group["step"], completions, scores))
        self.groups = groups[-self.own.size :]


def select_varied(rewards: Sequence[float | None], count: int | None) -> list[int]:
    """Return the places of ``count`` rewards with the largest variance, in order; None: of all.

    Undefined rewards (None) are left out first."""
    size = len(rewards)
    if count is None or count >= size:
        return [*range(size)]
    defined = {row: reward for row, reward in enumerate(rewards) if reward is not None}
    order = sorted(defined, key=defined.__getitem__)
    # The lowest and the highest ones (as PODS shows); what varies is how many of each.
    parts = [
        [*order[:low], *order[max(low, len(order) - count + low) :]] for low in range(count + 1)
    ]
    return sorted(max(parts, key=lambda rows: statistics.pvariance(defined[row] for row in rows)))


def _serialize(completion: Completion, score: Score) -> dict[str, Any]:
    return {
        "tokens": len(completion.token_ids),
        "text": completion.text,
        "stop": completion.stop,
        "rewards": dict(score.rewards),
        "total": score.total,
        "metrics": dict(score.metrics),
        "failures": dict(score.failures),
    }


def _restore(row: Mapping[str, Any], tokens: Tensor, logprobs: Tensor) -> tuple[Completion, Score]:
    token_ids, known = tuple(tokens.tolist()), tuple(logprobs.tolist())
    completion = Completion(token_ids, known, row["text"], row["stop"])
    score = Score(None, row["rewards"], row["total"], row["metrics"], row["failures"])
    return completion, score
