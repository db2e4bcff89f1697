"""A policy over two tokens whose expected gradients are sums over all completions, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.objective import StepTotals, TokenBatch, group_advantages, policy_loss

ALPHABET = 3
LENGTH = 2
COMPLETIONS = list(itertools.product(range(ALPHABET), repeat=LENGTH))
EXACT: dict[str, Any] = {
    "rtol": 0.0,
    "atol": 1e-12,
}  # float64: sums of at most 729 terms of order 1


@dataclass(frozen=True)
class Policy:
    """An autoregressive policy over two tokens: logits of the first, and of the second given it."""

    first: Tensor
    second: Tensor

    @classmethod
    def random(cls) -> Policy:
        return cls(torch.randn(ALPHABET), torch.randn(ALPHABET, ALPHABET))

    def with_gradient(self) -> Policy:
        return Policy(self.first.clone().requires_grad_(), self.second.clone().requires_grad_())

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.first, self.second

    def logprobs(self) -> Tensor:
        """Return the log-prob of each token of each completion, (9, 2)."""
        first, second = self.first.log_softmax(-1), self.second.log_softmax(-1)
        return torch.stack([torch.stack([first[a], second[a, b]]) for a, b in COMPLETIONS])

    def probabilities(self) -> Tensor:
        """Return the probability of each completion, (9,)."""
        return self.logprobs().sum(dim=1).exp()


def gradient(loss: Tensor, policy: Policy) -> Tensor:
    parts = torch.autograd.grad(loss, policy.parameters, materialize_grads=True, allow_unused=True)
    return torch.cat([part.flatten() for part in parts])


def expected_gradient(
    policy: Policy,
    settings: ObjectiveSettings,
    advantages: Callable[[list[int]], Tensor],
    *,
    size: int,
    sampled_from: Policy | None = None,
) -> Tensor:
    """Return −E[gradient of the loss of one group of ``size`` completions] × LENGTH.

    (dr_grpo divides the sum over tokens by the length; the true gradients below do not.)
    """
    weights = (sampled_from or policy).probabilities().detach()
    sampler = None if sampled_from is None else sampled_from.logprobs()
    totals = StepTotals(size, size * LENGTH, LENGTH)
    logprobs = policy.logprobs()
    loss = torch.zeros(())
    for outcome in itertools.product(range(len(COMPLETIONS)), repeat=size):
        chosen = list(outcome)
        batch = TokenBatch(
            logprobs=logprobs[chosen].flatten(),
            completion=torch.arange(size).repeat_interleave(LENGTH),
            advantages=advantages(chosen),
            lengths=torch.full((size,), LENGTH),
            sampler_logprobs=None if sampler is None else sampler[chosen].flatten(),
        )
        loss = loss + weights[chosen].prod() * policy_loss(batch, totals, settings).loss
    return -gradient(loss, policy) * LENGTH


def make_estimator(rewards: Tensor, **options: str) -> Callable[[list[int]], Tensor]:
    def advantages(chosen: list[int]) -> Tensor:
        return group_advantages(rewards[chosen], [0] * len(chosen), **options).values

    return advantages


def unbiased_settings(**fields: Any) -> ObjectiveSettings:
    """Settings with a constant normalizer."""
    return ObjectiveSettings(loss_type="dr_grpo", **fields)


UNCLIPPED: dict[str, Any] = {"num_iterations": 2, "epsilon": 0.999999, "epsilon_high": 1e6}
"""Two updates whose ratios are never clipped, however far the policies differ."""


def reward_gradient(policy: Policy, rewards: Tensor) -> Tensor:
    return gradient((policy.probabilities() * rewards).sum(), policy)
