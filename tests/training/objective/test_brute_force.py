"""Expected gradients of the estimators, computed by enumeration, against the true gradients.

The policy generates two tokens from an alphabet of three, so there are nine completions and 9^G
outcomes of a group of G. An expectation is a sum over them, in float64, with nothing sampled: a
difference from the true gradient is bias, not noise.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from enumeration import (
    EXACT,
    UNCLIPPED,
    Policy,
    expected_gradient,
    gradient,
    make_estimator,
    reward_gradient,
    unbiased_settings,
)

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.objective import StepTotals, TokenBatch, group_advantages, policy_loss

# Thousands of small calls, whose shapes are those of the other tests of this folder.
pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.no_shapes]


# Advantages.


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_follows_the_gradient_of_the_expected_reward(size):
    policy, rewards = Policy.random().with_gradient(), torch.randn(9)
    found = expected_gradient(
        policy,
        unbiased_settings(),
        make_estimator(rewards, estimator="rloo", scale_rewards="none"),
        size=size,
    )
    torch.testing.assert_close(found, reward_gradient(policy, rewards), **EXACT)


@pytest.mark.parametrize("size", [2, 3])
def test_the_group_mean_shrinks_the_gradient_by_one_minus_one_over_g(size):
    """The mean includes the completion's own reward, so 1/G of it cancels.

    The direction is right, so the learning rate compensates for it.
    """
    policy, rewards = Policy.random().with_gradient(), torch.randn(9)
    found = expected_gradient(
        policy, unbiased_settings(), make_estimator(rewards, scale_rewards="none"), size=size
    )
    true = reward_gradient(policy, rewards)
    torch.testing.assert_close(found, (1 - 1 / size) * true, **EXACT)


def success_factor(p: float, size: int) -> float:
    """f(p) of the next test: E[(1/G) Σ A_i ∇log π(o_i)] = f(p) · ∇p.

    K ~ Binomial(G, p); a success has a mean score of ∇p/p, a failure of −∇p/(1−p).
    """
    factor = 0.0
    for k in range(1, size):
        probability = math.comb(size, k) * p**k * (1 - p) ** (size - k)
        mean = k / size
        scale = math.sqrt(k * (1 - mean) / (size - 1)) + 1e-4
        success, failure = (1 - mean) / scale, -mean / scale
        factor += probability * (k * success / p - (size - k) * failure / (1 - p)) / size
    return factor


def test_dividing_by_the_groups_deviation_weights_prompts_by_their_difficulty():
    """With rewards 0 and 1, grpo's expected gradient is f(p) · ∇p, p the probability of success.

    f is not constant: prompts that are solved nearly always or nearly never have a larger weight
    than in the expected reward.
    """
    size = 8
    for p in (0.5, 0.9):
        logit = torch.logit(torch.tensor(p)).requires_grad_()
        logprobs = torch.stack([torch.nn.functional.logsigmoid(x) for x in (-logit, logit)])
        loss = torch.zeros(())
        for outcome in itertools.product((0, 1), repeat=size):
            chosen = list(outcome)
            batch = TokenBatch(
                logprobs[chosen],
                torch.arange(size),
                group_advantages(torch.tensor(chosen).double(), [0] * size).values,
                torch.ones(size, dtype=torch.long),
            )
            probability = logprobs[chosen].sum().exp().detach()
            part = policy_loss(batch, StepTotals(size, size, 1), ObjectiveSettings()).loss
            loss = loss + probability * part
        found = -torch.autograd.grad(loss, logit)[0].item()
        assert found == pytest.approx(success_factor(p, size) * p * (1 - p), abs=1e-12)
    # At p = 0.9 the deviation is smaller by 0.3 / 0.5, but 43 % of the groups have no spread.
    assert success_factor(0.9, size) > 1.15 * success_factor(0.5, size)


def test_dividing_by_the_groups_deviation_rotates_the_gradient_of_graded_rewards():
    """With more than two reward values the bias is no longer a factor: the direction differs."""
    policy, rewards = Policy.random().with_gradient(), torch.randn(9) ** 3
    found = expected_gradient(policy, unbiased_settings(), make_estimator(rewards), size=3)
    true = reward_gradient(policy, rewards)
    cosine = torch.nn.functional.cosine_similarity(found, true, dim=0)
    assert 0.5 < cosine < 0.999  # ascent, in a different direction


def test_the_mean_over_tokens_weights_short_completions_more():
    """loss_type=grpo divides each completion's tokens by its own length.

    Two completions of lengths 1 and 4 with opposite advantages: a token of the short one has four
    times the weight. dr_grpo gives each token the same weight.
    """
    weights = {}
    for loss_type in ("grpo", "dr_grpo"):
        logprobs = torch.zeros(5, requires_grad=True)
        lengths = torch.tensor([1, 4])
        completion = torch.tensor([0, 1, 1, 1, 1])
        batch = TokenBatch(logprobs, completion, torch.tensor([1.0, -1.0]), lengths)
        settings = ObjectiveSettings(loss_type=loss_type)
        policy_loss(batch, StepTotals.from_lengths(lengths, None, 4), settings).loss.backward()
        assert logprobs.grad is not None
        weights[loss_type] = (logprobs.grad[0] / -logprobs.grad[1]).item()
    assert weights == {"grpo": pytest.approx(4.0), "dr_grpo": pytest.approx(1.0)}


# Ratios.


def test_the_sequence_ratio_of_the_sampler_correction_is_exact():
    """Completions of another policy, weighted by π/π_sampler of the full completion."""
    policy, sampler, rewards = Policy.random().with_gradient(), Policy.random(), torch.randn(9)
    found = expected_gradient(
        policy,
        unbiased_settings(sampler_correction="sequence", sampler_correction_cap=1e6),
        make_estimator(rewards, estimator="rloo", scale_rewards="none"),
        size=2,
        sampled_from=sampler,
    )
    torch.testing.assert_close(found, reward_gradient(policy, rewards), **EXACT)


@pytest.mark.parametrize("correction", ["sequence", "sequence_mask"])
@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_the_first_update_on_stale_completions_is_unbiased_without_a_bound(correction, estimator):
    """The policy has made a step since its completions were sampled (rollout.steps_ahead=1).

    The sampler's weights are two real steps of gradient ascent behind, so that the ratios are
    those of a run, and the ratio to the policy at the step's start is 1.
    """
    stale, rewards = Policy.random(), torch.randn(9)
    policy = stale.with_gradient()
    for _ in range(2):
        ascent = reward_gradient(policy, rewards).split([p.numel() for p in policy.parameters])
        moved = [p.detach() + a.view_as(p) for p, a in zip(policy.parameters, ascent, strict=True)]
        policy = Policy(*moved).with_gradient()
    found = expected_gradient(
        policy,
        unbiased_settings(sampler_correction=correction, sampler_correction_cap=None),
        make_estimator(rewards, estimator=estimator, scale_rewards="none"),
        size=2,
        sampled_from=stale,
    )
    factor = 1.0 if estimator == "rloo" else 1 - 1 / 2  # of the group's mean, as without staleness
    torch.testing.assert_close(found, factor * reward_gradient(policy, rewards), **EXACT)


def test_later_updates_multiply_both_ratios():
    """π_θ/π_old, which is clipped, times π_old/π_sampler: together the ratio to the sampler."""
    policy, old, sampler = Policy.random().with_gradient(), Policy.random(), Policy.random()
    rewards = torch.randn(9)
    found = expected_gradient(
        policy,
        unbiased_settings(**UNCLIPPED, sampler_correction="token", sampler_correction_cap=None),
        make_estimator(rewards, estimator="rloo", scale_rewards="none"),
        size=2,
        sampled_from=sampler,
        old=old,
    )
    direct = expected_gradient(
        policy,
        unbiased_settings(**UNCLIPPED),
        make_estimator(rewards, estimator="rloo", scale_rewards="none"),
        size=2,
        old=sampler,
    )
    torch.testing.assert_close(found, direct, **EXACT)


def test_bounds_and_masks_change_the_weights_beyond_them():
    """Against a direct sum over all outcomes: clipped weights, and weights of 0."""
    policy, sampler, rewards = Policy.random().with_gradient(), Policy.random(), torch.randn(9)
    weights = (policy.probabilities() / sampler.probabilities()).detach()
    bounds = {"sampler_correction_cap": 1.5, "sampler_correction_floor": 0.5}
    assert (weights > 1.5).any()
    assert (weights < 0.5).any()
    inside = (weights >= 0.5) & (weights <= 1.5)
    for correction, expected in (
        ("sequence", weights.clamp(0.5, 1.5)),
        ("sequence_mask", weights * inside),
    ):
        found = expected_gradient(
            policy,
            unbiased_settings(sampler_correction=correction, **bounds),
            lambda chosen: rewards[chosen],
            size=1,
            sampled_from=sampler,
        )
        weighted = sampler.probabilities() * expected * rewards
        true = gradient((weighted * policy.logprobs().sum(dim=1)).sum(), policy)
        torch.testing.assert_close(found, true, **EXACT)


@pytest.mark.parametrize("correction", ["none", "token"])
def test_a_token_correction_or_none_leaves_a_bias(correction):
    """The token's ratio does not correct for a prefix that another policy sampled."""
    policy, sampler, rewards = Policy.random().with_gradient(), Policy.random(), torch.randn(9)
    found = expected_gradient(
        policy,
        unbiased_settings(sampler_correction=correction, sampler_correction_cap=1e6)
        if correction != "none"
        else unbiased_settings(),
        make_estimator(rewards, estimator="rloo", scale_rewards="none"),
        size=2,
        sampled_from=sampler,
    )
    assert (found - reward_gradient(policy, rewards)).abs().max() > 1e-2


def test_token_ratios_after_the_first_update_ignore_who_sampled_the_prefix():
    """The surrogate's bias at μ > 1; with π_old = π_θ the same computation is exact."""
    policy, old, rewards = Policy.random().with_gradient(), Policy.random(), torch.randn(9)
    advantages = make_estimator(rewards, estimator="rloo", scale_rewards="none")
    true = reward_gradient(policy, rewards)
    moved = expected_gradient(policy, unbiased_settings(**UNCLIPPED), advantages, size=2, old=old)
    assert (moved - true).abs().max() > 1e-2
    unmoved = Policy(policy.first.detach(), policy.second.detach())
    first = expected_gradient(
        policy, unbiased_settings(**UNCLIPPED), advantages, size=2, old=unmoved
    )
    torch.testing.assert_close(first, true, **EXACT)
