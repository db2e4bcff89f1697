"""Training on the tokens with the highest entropy alone (arXiv:2506.01939)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.training.batch import Rollout, is_masked
from vlm_grpo.training.methods import Method, Scores
from vlm_grpo.types import Completion


class HighEntropy(Method):
    """Factors of the policy loss that keep the tokens with the highest entropy."""

    name = phase = "top_entropy"

    @classmethod
    def is_used(cls, objective: ObjectiveSettings) -> bool:
        return objective.top_entropy_quantile < 1

    def weigh_tokens(self, rollout: Rollout, scores: Scores) -> Mapping[int, Tensor] | None:
        objective = self.settings.objective
        completions = [c for group in rollout.groups for c in group.completions]
        active = [replace(c, entropies=()) if is_masked(c, objective) else c for c in completions]
        return select_high_entropy(active, objective.top_entropy_quantile)


def select_high_entropy(completions: Sequence[Completion], share: float) -> dict[int, Tensor]:
    """Return the (T,) factors of the tokens by completion: 1 for the share of the tokens of the
    step with the highest entropy, 0 for the others (arXiv:2506.01939, section 5).

    The threshold is the quantile 1 − share over all ranks, as in TRL. All ranks must call it.

    Args:
        completions: the completions, with the entropy of each token when it was sampled; those
            without are left out, and have factors of 1.
        share: share of the tokens, above 0 and below 1.
    """
    every = gather_object([value for c in completions for value in c.entropies])
    threshold = float(np.quantile(every, 1 - share)) if every else 0.0
    return {
        row: (torch.tensor(completion.entropies) >= threshold).float()
        if completion.entropies
        else torch.ones(len(completion.token_ids))
        for row, completion in enumerate(completions)
    }
