"""Expected gradients of the estimators, computed by enumeration, against the true gradients.

The policy generates two tokens from an alphabet of three, so there are nine completions and 9^G
outcomes of a group of G. An expectation is a sum over them, in float64, with nothing sampled: a
difference from the true gradient is bias, not noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.objective import (
    KL_ESTIMATORS,
    StepTotals,
    TokenBatch,
    group_advantages,
    kl_penalties,
    policy_loss,
)

ALPHABET = 3
LENGTH = 2
COMPLETIONS = list(itertools.product(range(ALPHABET), repeat=LENGTH))
EXACT: dict[str, Any] = {
    "rtol": 0.0,
    "atol": 1e-12,
}  # float64: sums of at most 729 terms of order 1


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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


def flatten(chosen: list[int], table: Tensor | None) -> Tensor | None:
    return None if table is None else table[chosen].flatten()


def expected_gradient(
    policy: Policy,
    settings: ObjectiveSettings,
    advantages: Callable[[list[int]], Tensor],
    *,
    size: int,
    sampled_from: Policy | None = None,
    reference: Policy | None = None,
    old: Policy | None = None,
) -> Tensor:
    """Return −E[gradient of the loss of one group of ``size`` completions] × LENGTH.

    (dr_grpo divides the sum over tokens by the length; the true gradients below do not.)
    """
    behavior = sampled_from or old or policy
    weights = behavior.probabilities().detach()
    tables = {
        "sampler_logprobs": None if sampled_from is None else sampled_from.logprobs(),
        "reference_logprobs": None if reference is None else reference.logprobs(),
        "old_logprobs": None if old is None else old.logprobs(),
    }
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
            **{name: flatten(chosen, table) for name, table in tables.items()},
        )
        loss = loss + weights[chosen].prod() * policy_loss(batch, totals, settings).loss
    return -gradient(loss, policy) * LENGTH


def make_estimator(rewards: Tensor, **options: str) -> Callable[[list[int]], Tensor]:
    def advantages(chosen: list[int]) -> Tensor:
        return group_advantages(rewards[chosen], [0] * len(chosen), **options).values

    return advantages


def no_advantages(chosen: list[int]) -> Tensor:
    return torch.zeros(len(chosen))


def unbiased_settings(**fields: Any) -> ObjectiveSettings:
    """Settings with a constant normalizer."""
    return ObjectiveSettings(loss_type="dr_grpo", **fields)


UNCLIPPED: dict[str, Any] = {"num_iterations": 2, "epsilon": 0.999999, "epsilon_high": 1e6}
"""Two updates whose ratios are never clipped, however far the policies differ."""


def reward_gradient(policy: Policy, rewards: Tensor) -> Tensor:
    return gradient((policy.probabilities() * rewards).sum(), policy)


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
        completion = torch.arange(len(chosen)).repeat_interleave(LENGTH)
        penalty = kl_penalties(
            logprobs[chosen].flatten(),
            references[chosen].flatten(),
            completion,
            len(chosen),
            estimator,
        )
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
