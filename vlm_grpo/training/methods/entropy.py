"""Training on the tokens with the highest entropy alone (arXiv:2506.01939)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm_grpo.config.combinations import get
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.training.methods import Method
from vlm_grpo.training.step_batch import Rollout, Values, is_masked


class HighEntropy(Method):
    """Factors of the policy loss that keep the tokens with the highest entropy."""

    name, block = "top_entropy", "objective.top_entropy_quantile"
    own: float

    @classmethod
    def find(cls, settings: Settings | Mapping[str, Any]) -> float | None:
        share = get(settings, cls.block)
        return None if share is None or share >= 1 else share

    def weigh_tokens(self, rollout: Rollout, scores: Values) -> Tensor:
        objective, completions = self.run.settings.objective, rollout.completions
        entropies = [() if is_masked(c, objective) else c.entropies for c in completions]
        return select_high_entropy(entropies, rollout.layout.lengths.tolist(), self.own)


def select_high_entropy(
    entropies: Sequence[Sequence[float]], lengths: Sequence[int], share: float
) -> Tensor:
    """Return (T,) factors of the tokens: 1 for the share of the tokens of the step with the highest
    entropy, 0 for the others (arXiv:2506.01939, section 5).

    The threshold is the quantile 1 − share over all ranks, as in TRL. All ranks must call it. A
    completion without entropies at sampling is left out, and has factors of 1.
    """
    every = gather_object([value for values in entropies for value in values])
    threshold = float(np.quantile(every, 1 - share)) if every else 0.0
    parts = [
        (torch.tensor(values) >= threshold).float() if values else torch.ones(length)
        for values, length in zip(entropies, lengths, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0)
