"""A method of one file: train more on the first tokens of an answer.

vlm-grpo train counting 'methods=[docs/examples/first_tokens.py]'
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vlm_grpo.config.methods import MethodSettings
from vlm_grpo.training.methods import Method
from vlm_grpo.training.step_batch import Rollout, Values


class FirstTokensSettings(MethodSettings):
    """Factors of the policy loss."""

    count: int = Field(default=2, ge=1)
    """Number of tokens at the start of an answer."""
    factor: float = Field(default=2.0, gt=0)
    """Factor of their weight in the policy loss; that of the others is 1."""


class FirstTokens(Method):
    """A higher weight of the first tokens of each completion."""

    name = "first_tokens"
    own: FirstTokensSettings

    def weigh_tokens(self, rollout: Rollout, scores: Values) -> Tensor:
        factors = torch.ones(rollout.layout.total)
        for part in rollout.layout.split(factors):  # views of the same memory
            part[: self.own.count] = self.own.factor
        return factors
