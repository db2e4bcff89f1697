"""Expected gradients of the estimators, computed by enumeration, against the true gradients.

There are nine completions of two tokens from an alphabet of three, and 9^G outcomes of a group of
G. An expectation is a sum over them, in float64: a difference is bias, not noise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gradients import gradient
from groups import make_tokens
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.objective.advantages import group_advantages
from vlm_grpo.training.objective.kl import KL_ESTIMATORS
from vlm_grpo.training.objective.losses import policy_loss
from vlm_grpo.training.objective.token_batch import StepTotals

ALPHABET = 3
LENGTH = 2
COMPLETIONS = list(itertools.product(range(ALPHABET), repeat=LENGTH))
# float64: sums of at most 729 terms of order 1
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


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
        own = {} if sampler is None else {"sampler_logprobs": sampler[chosen].flatten()}
        given = [LENGTH] * size, advantages(chosen)
        batch = make_tokens(logprobs[chosen].flatten(), *given, **own)
        loss = loss + weights[chosen].prod() * policy_loss(batch, totals, settings).loss
    return -gradient(loss, *policy.parameters) * LENGTH


def make_estimator(rewards: Tensor, estimator: str) -> Callable[[list[int]], Tensor]:
    given = {"estimator": estimator, "scale_rewards": "none"}
    return lambda chosen: group_advantages(rewards[chosen], [0] * len(chosen), **given).values


# With a constant normalizer.
unbiased_settings = functools.partial(ObjectiveSettings, loss_type="dr_grpo")


def reward_gradient(policy: Policy, rewards: Tensor) -> Tensor:
    return gradient((policy.probabilities() * rewards).sum(), *policy.parameters)


# Thousands of small calls, whose shapes are those of the other tests of this folder.
pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.no_shapes]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_rloo_follows_the_gradient_of_the_expected_reward(estimator, size):
    """The group's mean includes the completion's own reward, so 1/G of it cancels."""
    policy, rewards = Policy.random().with_gradient(), torch.randn(9)
    advantages = make_estimator(rewards, estimator)
    found = expected_gradient(policy, unbiased_settings(), advantages, size=size)
    factor = 1 if estimator == "rloo" else 1 - 1 / size
    torch.testing.assert_close(found, factor * reward_gradient(policy, rewards), **EXACT)


def success_factor(p: float, size: int) -> float:
    """f(p) of the next test: E[(1/G) Σ A_i ∇log π(o_i)] = f(p) · ∇p. The number of successes is
    binomial; a success has a mean score of ∇p/p, a failure of −∇p/(1−p)."""
    factor = 0.0
    for k in range(1, size):
        probability = math.comb(size, k) * p**k * (1 - p) ** (size - k)
        mean = k / size
        scale = math.sqrt(k * (1 - mean) / (size - 1)) + 1e-4
        success, failure = (1 - mean) / scale, -mean / scale
        factor += probability * (k * success / p - (size - k) * failure / (1 - p)) / size
    return factor


def test_dividing_by_the_groups_deviation_weights_prompts_by_their_difficulty():
    """With rewards 0 and 1, grpo's expected gradient is f(p) · ∇p, p the probability of success. f
    is larger for prompts that are solved nearly always or nearly never."""
    size = 8
    for p in (0.5, 0.9):
        logit = torch.logit(torch.tensor(p)).requires_grad_()
        logprobs = torch.stack([torch.nn.functional.logsigmoid(x) for x in (-logit, logit)])
        loss = torch.zeros(())
        for outcome in itertools.product((0, 1), repeat=size):
            chosen = list(outcome)
            advantages = group_advantages(torch.tensor(chosen).double(), [0] * size).values
            batch = make_tokens(logprobs[chosen], [1] * size, advantages)
            probability = logprobs[chosen].sum().exp().detach()
            part = policy_loss(batch, StepTotals(size, size, 1), ObjectiveSettings()).loss
            loss = loss + probability * part
        found = -torch.autograd.grad(loss, logit)[0].item()
        assert found == pytest.approx(success_factor(p, size) * p * (1 - p), abs=1e-12)
    # At p = 0.9 the deviation is smaller by 0.3 / 0.5, but 43 % of the groups have no spread.
    assert success_factor(0.9, size) > 1.15 * success_factor(0.5, size)


@pytest.mark.parametrize("correction", ["sequence", "sequence_mask"])
@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_the_first_update_on_stale_completions_is_unbiased_without_a_bound(correction, estimator):
    """As with rollout.steps_ahead. The sampler's weights are two real steps of gradient ascent
    behind, so that the ratios are those of a run; that to the policy at the step's start is 1."""
    stale, rewards = Policy.random(), torch.randn(9)
    policy = stale.with_gradient()
    for _ in range(2):
        ascent = reward_gradient(policy, rewards).split([p.numel() for p in policy.parameters])
        moved = [p.detach() + a.view_as(p) for p, a in zip(policy.parameters, ascent, strict=True)]
        policy = Policy(*moved).with_gradient()
    settings = unbiased_settings(sampler_correction=correction, sampler_correction_cap=None)
    advantages = make_estimator(rewards, estimator)
    found = expected_gradient(policy, settings, advantages, size=2, sampled_from=stale)
    factor = 1.0 if estimator == "rloo" else 1 - 1 / 2  # of the group's mean, as without staleness
    torch.testing.assert_close(found, factor * reward_gradient(policy, rewards), **EXACT)


KL = {"beta": 1.0, "reference_refresh_every": "never"}


def token_gradient(
    settings: ObjectiveSettings, logits: Tensor, old: Tensor | None, reference: Tensor
) -> Tensor:
    """Return E[gradient of β·KL in the loss] over completions of one token from ``old`` (or from
    the policy), with advantages of 0."""
    logprobs, weights = logits.log_softmax(-1), (logits if old is None else old).softmax(-1)
    given = {"reference_logprobs": reference} | ({} if old is None else {"old_logprobs": old})
    loss = torch.zeros(())
    for token, weight in enumerate(weights.detach()):
        own = {name: values.log_softmax(-1)[token, None] for name, values in given.items()}
        batch = make_tokens(logprobs[token, None], [1], torch.zeros(1), **own)
        loss = loss + weight * policy_loss(batch, StepTotals(1, 1, 1), settings).loss
    return torch.autograd.grad(loss, logits)[0]


def exact_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of two vectors of logits, by enumeration."""
    return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_corrected_kl_in_the_loss_follows_the_gradient_of_the_kl(estimator, moved):
    """Before the first update (the ratio is 1 by construction) and after it (π_θ ≠ π_old)."""
    logits, old, reference = torch.randn(5, requires_grad=True), torch.randn(5), torch.randn(5)
    # Two updates whose ratios are never clipped, however far the policies differ.
    unclipped = {"num_iterations": 2, "epsilon": 0.999999, "epsilon_high": 1e6} if moved else {}
    settings = unbiased_settings(kl_estimator=estimator, **KL, **unclipped)
    found = token_gradient(settings, logits, old if moved else None, reference)
    true = torch.autograd.grad(exact_kl(logits, reference), logits)[0]
    torch.testing.assert_close(found, true, **EXACT)


@pytest.mark.parametrize(("estimator", "is_reversed"), [("k2", False), ("k3", True)])
def test_k3_alone_follows_the_kl_in_the_other_direction(estimator, is_reversed):
    """Without the ratio, as in the GRPO paper, E[∇k3] is the gradient of KL(reference ‖ policy);
    E[∇k2] = E[d·∇log π] is that of KL(policy ‖ reference)."""
    logits, reference = torch.randn(5, requires_grad=True), torch.randn(5)
    settings = unbiased_settings(kl_estimator=estimator, use_bias_correction_kl=False, **KL)
    found = token_gradient(settings, logits, None, reference)
    pair = (reference, logits) if is_reversed else (logits, reference)
    torch.testing.assert_close(found, torch.autograd.grad(exact_kl(*pair), logits)[0], **EXACT)


def test_k1_in_the_reward_follows_the_gradient_of_the_kl_of_completions():
    policy, reference, rewards = Policy.random().with_gradient(), Policy.random(), torch.randn(9)
    logprobs, references = policy.logprobs().detach(), reference.logprobs()

    def estimate(chosen: list[int]) -> Tensor:
        pair = logprobs[chosen].flatten(), references[chosen].flatten()
        penalty = KL_ESTIMATORS["k1"](*pair).view(len(chosen), -1).sum(dim=1)
        total, ids = rewards[chosen] - 0.4 * penalty, [0] * len(chosen)
        return group_advantages(total, ids, estimator="rloo", scale_rewards="none").values

    found = expected_gradient(policy, unbiased_settings(), estimate, size=2)
    kl = policy.probabilities() * (policy.logprobs() - references).sum(dim=1)
    objective = (policy.probabilities() * rewards - 0.4 * kl).sum()
    torch.testing.assert_close(found, gradient(objective, *policy.parameters), **EXACT)
