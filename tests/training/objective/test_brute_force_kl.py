"""Expected gradients of the KL, in the loss and in the reward, against those of the true KL.

As in ``test_brute_force``: sums over all outcomes in float64, with nothing sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from enumeration import (
    ALPHABET,
    EXACT,
    UNCLIPPED,
    Policy,
    expected_gradient,
    gradient,
    no_advantages,
    unbiased_settings,
)
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.objective import (
    KL_ESTIMATORS,
    StepTotals,
    TokenBatch,
    group_advantages,
    policy_loss,
)

# Thousands of small calls, whose shapes are those of the other tests of this folder.
pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.no_shapes]

# The KL in the loss. One-token completions, whose token ratio is the completion's ratio; the last
# section has completions of two tokens.


def token_gradient(
    probabilities: Callable[[Tensor], Tensor],
    settings: ObjectiveSettings,
    logits: Tensor,
    old: Tensor | None,
    reference: Tensor,
) -> Tensor:
    """Return E[gradient of β·KL in the loss] over one token from ``old`` (or from the policy)."""
    logprobs = logits.log_softmax(-1)
    old_logprobs = None if old is None else old.log_softmax(-1)
    weights = probabilities(logits if old is None else old).detach()
    loss = torch.zeros(())
    for token in range(len(logits)):
        batch = TokenBatch(
            logprobs=logprobs[token, None],
            completion=torch.zeros(1, dtype=torch.long),
            advantages=torch.zeros(1),
            lengths=torch.ones(1, dtype=torch.long),
            old_logprobs=None if old_logprobs is None else old_logprobs[token, None],
            reference_logprobs=reference.log_softmax(-1)[token, None],
        )
        loss = loss + weights[token] * policy_loss(batch, StepTotals(1, 1, 1), settings).loss
    return torch.autograd.grad(loss, logits)[0]


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def exact_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of two vectors of logits, by enumeration."""
    return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_corrected_kl_in_the_loss_follows_the_gradient_of_the_kl(estimator, moved):
    """Before the first update (the ratio is 1 by construction) and after it (π_θ ≠ π_old)."""
    logits, old, reference = torch.randn(5, requires_grad=True), torch.randn(5), torch.randn(5)
    settings = unbiased_settings(
        beta=1.0,
        kl_estimator=estimator,
        reference_refresh_every="never",
        **(UNCLIPPED if moved else {}),
    )
    found = token_gradient(softmax, settings, logits, old if moved else None, reference)
    true = torch.autograd.grad(exact_kl(logits, reference), logits)[0]
    torch.testing.assert_close(found, true, **EXACT)


def test_k1_alone_has_no_gradient_in_expectation():
    """E[∇k1] = E[∇log π] = 0, however far the reference is, so the settings refuse it."""
    logits, reference = torch.randn(5, requires_grad=True), torch.randn(5)
    logprobs = logits.log_softmax(-1)
    k1 = KL_ESTIMATORS["k1"](logprobs, reference.log_softmax(-1))
    found = torch.autograd.grad((logprobs.exp().detach() * k1).sum(), logits)[0]
    torch.testing.assert_close(found, torch.zeros(5), **EXACT)


def test_k3_alone_follows_the_kl_in_the_other_direction():
    """Without the ratio, as in the GRPO paper, E[∇k3] is the gradient of KL(reference ‖ policy)."""
    logits, reference = torch.randn(5, requires_grad=True), torch.randn(5)
    settings = unbiased_settings(
        beta=1.0, use_bias_correction_kl=False, reference_refresh_every="never"
    )
    found = token_gradient(softmax, settings, logits, None, reference)
    other = torch.autograd.grad(exact_kl(reference, logits), logits)[0]
    torch.testing.assert_close(found, other, **EXACT)
    true = torch.autograd.grad(exact_kl(logits, reference), logits)[0]
    assert (found - true).abs().max() > 1e-2


def test_k3_alone_follows_neither_kl_once_the_policy_has_moved():
    logits, old, reference = torch.randn(5, requires_grad=True), torch.randn(5), torch.randn(5)
    settings = unbiased_settings(
        beta=1.0, use_bias_correction_kl=False, reference_refresh_every="never", **UNCLIPPED
    )
    found = token_gradient(softmax, settings, logits, old, reference)
    for true in (exact_kl(logits, reference), exact_kl(reference, logits)):
        assert (found - torch.autograd.grad(true, logits)[0]).abs().max() > 1e-2


def test_k2_follows_the_kl_alone_and_half_the_mean_square_when_corrected():
    """E[∇k2] = E[d·∇log π] is the KL's gradient; the gradient of E[ρ·k2] is that of E[d²]/2."""
    logits, reference = torch.randn(5, requires_grad=True), torch.randn(5)
    fields = {"beta": 1.0, "kl_estimator": "k2", "reference_refresh_every": "never"}
    alone = token_gradient(
        softmax, unbiased_settings(use_bias_correction_kl=False, **fields), logits, None, reference
    )
    true = torch.autograd.grad(exact_kl(logits, reference), logits)[0]
    torch.testing.assert_close(alone, true, **EXACT)
    corrected = token_gradient(softmax, unbiased_settings(**fields), logits, None, reference)
    difference = logits.log_softmax(-1) - reference.log_softmax(-1)
    half_square = (logits.softmax(-1) * difference**2 / 2).sum()
    torch.testing.assert_close(corrected, torch.autograd.grad(half_square, logits)[0], **EXACT)


def test_the_coefficients_of_the_gradient_at_ratio_one():
    """A token's gradient is −(A + β(π_ref/π − 1)) alone and −(A − β log(π/π_ref)) corrected."""
    advantage, beta = 0.7, 0.3
    logprob = torch.tensor([-1.2], requires_grad=True)
    reference = torch.tensor([-0.5])
    batch = TokenBatch(
        logprob,
        torch.zeros(1, dtype=torch.long),
        torch.tensor([advantage]),
        torch.ones(1, dtype=torch.long),
        reference_logprobs=reference,
    )
    fields = {"beta": beta, "reference_refresh_every": "never"}
    log_ratio = (logprob - reference).item()
    for corrected, kl in ((False, 1 - math.exp(-log_ratio)), (True, log_ratio)):
        settings = ObjectiveSettings(use_bias_correction_kl=corrected, **fields)
        loss = policy_loss(batch, StepTotals(1, 1, 1), settings).loss
        found = torch.autograd.grad(loss, logprob)[0].item()
        assert found == pytest.approx(-(advantage - beta * kl), abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "corrected"),
    # k1 without the ratio is refused by the settings
    [("k1", True), ("k2", True), ("k2", False), ("k3", True), ("k3", False)],
)
def test_a_fresh_reference_has_no_kl_in_expectation(estimator, corrected):
    """k = 1, μ = 1: the reference is the policy. k2 and k3 are exactly 0, k1 on average."""
    logits = torch.randn(5, requires_grad=True)
    settings = unbiased_settings(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=corrected)
    found = token_gradient(softmax, settings, logits, None, logits.detach())
    torch.testing.assert_close(found, torch.zeros(5), **EXACT)


# The KL of completions of two tokens.


def completion_kl(policy: Policy, reference: Policy) -> Tensor:
    log_ratio = (policy.logprobs() - reference.logprobs()).sum(dim=1)
    return (policy.probabilities() * log_ratio).sum()


def make_penalized_estimator(
    rewards: Tensor, policy: Policy, reference: Policy, beta: float, estimator: str
) -> Callable[[list[int]], Tensor]:
    logprobs, references = policy.logprobs().detach(), reference.logprobs()

    def advantages(chosen: list[int]) -> Tensor:
        pair = logprobs[chosen].flatten(), references[chosen].flatten()
        penalty = KL_ESTIMATORS[estimator](*pair).view(len(chosen), -1).sum(dim=1)
        total = rewards[chosen] - beta * penalty
        return group_advantages(
            total, [0] * len(chosen), estimator="rloo", scale_rewards="none"
        ).values

    return advantages


def test_k1_in_the_reward_follows_the_gradient_of_the_kl_of_completions():
    policy, reference, rewards = Policy.random().with_gradient(), Policy.random(), torch.randn(9)
    found = expected_gradient(
        policy,
        unbiased_settings(),
        make_penalized_estimator(rewards, policy, reference, 0.4, "k1"),
        size=2,
    )
    objective = (policy.probabilities() * rewards).sum() - 0.4 * completion_kl(policy, reference)
    torch.testing.assert_close(found, gradient(objective, policy), **EXACT)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_are_biased(estimator):
    policy, reference, rewards = Policy.random().with_gradient(), Policy.random(), torch.randn(9)
    found = expected_gradient(
        policy,
        unbiased_settings(),
        make_penalized_estimator(rewards, policy, reference, 0.4, estimator),
        size=2,
    )
    objective = (policy.probabilities() * rewards).sum() - 0.4 * completion_kl(policy, reference)
    assert (found - gradient(objective, policy)).abs().max() > 1e-2


def test_the_kl_in_the_loss_ignores_a_tokens_effect_on_later_tokens():
    """In the loss, each token's gradient counts only that token's KL, given its prefix.

    The first token's gradient lacks its effect on the second token's KL; the second token's is
    the gradient of the completions' KL. k1 in the reward, above, has both.
    """
    policy, reference = Policy.random().with_gradient(), Policy.random()
    found = -expected_gradient(
        policy,
        unbiased_settings(beta=1.0, reference_refresh_every="never"),
        no_advantages,
        size=1,
        reference=reference,
    )
    exact = gradient(completion_kl(policy, reference), policy)
    first, second = found[:ALPHABET], found[ALPHABET:]
    alone = torch.autograd.grad(exact_kl(policy.first, reference.first), policy.first)[0]
    torch.testing.assert_close(first, alone, **EXACT)
    torch.testing.assert_close(second, exact[ALPHABET:], **EXACT)
    assert (first - exact[:ALPHABET]).abs().max() > 1e-2


def test_the_logged_kl_is_unbiased_after_the_policy_has_moved():
    """The mean over tokens of ρ·k3 under the old policy is exact for one-token completions."""
    logits, old, reference = torch.randn(5), torch.randn(5), torch.randn(5)
    settings = unbiased_settings(
        beta=1.0,
        kl_estimator="k2",  # the trained KL does not change the logged one
        use_bias_correction_kl=False,
        reference_refresh_every="never",
        **UNCLIPPED,
    )
    logged = 0.0
    for token, weight in enumerate(old.softmax(-1).tolist()):
        batch = TokenBatch(
            logits.log_softmax(-1)[token, None],
            torch.zeros(1, dtype=torch.long),
            torch.zeros(1),
            torch.ones(1, dtype=torch.long),
            old_logprobs=old.log_softmax(-1)[token, None],
            reference_logprobs=reference.log_softmax(-1)[token, None],
        )
        output = policy_loss(batch, StepTotals(1, 1, 1), settings)
        logged += weight * output.metrics.values()["kl"]
    assert logged == pytest.approx(exact_kl(logits, reference).item(), abs=1e-12)
