"""Losses: invariance under cutting and order, what is skipped, masked, clipped and measured."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from torch import Tensor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.objective import StepTotals, TokenBatch, needs_update, policy_loss
from vlm_grpo.objective.kl import KL_ESTIMATORS, k3, kl_penalties

LENGTHS = torch.tensor([9, 1, 4, 16, 2, 7, 16, 3])
MAX_LENGTH = 16
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
EVERYTHING: dict[str, Any] = {
    "num_iterations": 2,
    "beta": 0.1,
    "reference_refresh_every": "never",
    "entropy_coef": 0.01,
    "sampler_correction": "token",
}


def of_type(loss_type: str, **fields: Any) -> ObjectiveSettings:
    bound = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    return ObjectiveSettings(**{"loss_type": loss_type, **bound, **fields})


def make_step(dtype: torch.dtype = torch.float32) -> TokenBatch:
    """A step of eight completions, two of them masked out; every optional tensor is given."""
    tokens = int(LENGTHS.sum())
    logprobs = -3 * torch.rand(tokens, dtype=dtype)
    near = [logprobs + 0.3 * torch.randn(tokens, dtype=dtype) for _ in range(3)]
    return TokenBatch(
        logprobs=logprobs.requires_grad_(),
        completion=torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS),
        advantages=torch.randn(len(LENGTHS), dtype=dtype),
        lengths=LENGTHS,
        old_logprobs=near[0],
        reference_logprobs=near[1],
        sampler_logprobs=near[2],
        entropies=torch.rand(tokens, dtype=dtype).requires_grad_(),
        active=torch.tensor([True, True, False, True, True, True, False, True]),
    )


def part_of(step: TokenBatch, completions: list[int]) -> TokenBatch:
    """A micro-batch of these completions in this order."""
    rows = [(step.completion == c).nonzero().flatten() for c in completions]
    tokens = torch.cat(rows)

    def cut(values: Tensor | None, index: Any) -> Tensor | None:
        return None if values is None else values[index]

    return TokenBatch(
        logprobs=step.logprobs[tokens],
        completion=torch.arange(len(completions)).repeat_interleave(step.lengths[completions]),
        advantages=step.advantages[completions],
        lengths=step.lengths[completions],
        old_logprobs=cut(step.old_logprobs, tokens),
        reference_logprobs=cut(step.reference_logprobs, tokens),
        sampler_logprobs=cut(step.sampler_logprobs, tokens),
        entropies=cut(step.entropies, tokens),
        active=cut(step.active, completions),
    )


def totals_of(step: TokenBatch) -> StepTotals:
    return StepTotals.from_lengths(step.lengths, step.active, MAX_LENGTH)


def gradients(loss: Tensor, step: TokenBatch) -> Tensor:
    assert step.entropies is not None
    found = torch.autograd.grad(
        loss, (step.logprobs, step.entropies), allow_unused=True, materialize_grads=True
    )
    return torch.cat(found)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_the_cut_and_the_order_change_nothing(loss_type, level, pieces):
    """Loss, gradient and metrics of the step, cut into micro-batches in a shuffled order."""
    settings = of_type(loss_type, importance_sampling_level=level, **EVERYTHING)
    step = make_step()
    totals = totals_of(step)
    whole = policy_loss(step, totals, settings)
    order = torch.randperm(len(LENGTHS)).tolist()
    size = len(order) // pieces
    parts = [
        policy_loss(part_of(step, order[i : i + size]), totals, settings)
        for i in range(0, len(order), size)
    ]
    assert len(parts) == pieces
    together = torch.stack([part.loss for part in parts]).sum()
    assert together.item() == pytest.approx(whole.loss.item(), abs=1e-6)
    # float32 holds 7 digits and gradients here are below 0.1.
    assert (gradients(together, step) - gradients(whole.loss, step)).abs().max() < 1e-6
    metrics = reduce(add, [part.metrics for part in parts]).values()
    assert metrics == pytest.approx(whole.metrics.values(), abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_completions_without_advantage_may_be_left_out(loss_type):
    """The gradient without them is the gradient with them, as long as the totals count them."""
    settings = of_type(loss_type, num_iterations=2)
    step = make_step()
    silent = torch.tensor([True, False, False, True, True, False, False, False])
    step = replace(step, advantages=-step.advantages.abs().masked_fill(silent, 0.0))
    kept = needs_update(step.advantages, step.active, settings)
    assert kept.tolist() == [False, True, False, False, False, True, False, True]
    whole = gradients(policy_loss(step, totals_of(step), settings).loss, step)
    part = part_of(step, kept.nonzero().flatten().tolist())
    fewer = gradients(policy_loss(part, totals_of(step), settings).loss, step)
    assert torch.equal(whole, fewer)


def test_completions_without_advantage_stay_where_something_else_trains_on_them():
    advantages = torch.tensor([0.0, 1.0])
    for fields in ({"entropy_coef": 0.1}, {"beta": 0.1, "reference_refresh_every": "never"}):
        settings = ObjectiveSettings(**fields)  # type: ignore[arg-type]
        assert needs_update(advantages, None, settings).tolist() == [True, True]
    in_reward = ObjectiveSettings(
        beta=0.1, kl_in="reward", kl_estimator="k1", reference_refresh_every="never"
    )
    assert needs_update(advantages, None, in_reward).tolist() == [False, True]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_one_update_needs_no_old_logprobs(loss_type, level):
    """None gives what the policy's own log-probs, stored and passed as old ones, give."""
    settings = of_type(loss_type, importance_sampling_level=level)
    step = replace(make_step(), old_logprobs=None, reference_logprobs=None)
    stored = replace(step, old_logprobs=step.logprobs.detach())
    totals = totals_of(step)
    without, given = (policy_loss(batch, totals, settings).loss for batch in (step, stored))
    assert torch.equal(gradients(without, step), gradients(given, step))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "dapo"}),
        ({"loss_type": "bnpo"}, {"loss_type": "dapo"}),
        ({"importance_sampling_level": "sequence"}, {}),
    ],
)
def test_with_one_update_some_losses_are_one(one, other):
    """At ratio 1 cispo, bnpo and dapo have one gradient, GSPO and grpo another."""
    step = replace(make_step(), old_logprobs=None, reference_logprobs=None)
    found = [
        gradients(policy_loss(step, totals_of(step), ObjectiveSettings(**fields)).loss, step)
        for fields in (one, other)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)
    grpo = gradients(policy_loss(step, totals_of(step), ObjectiveSettings()).loss, step)
    dapo = policy_loss(step, totals_of(step), ObjectiveSettings(loss_type="dapo")).loss
    assert (gradients(dapo, step) - grpo).abs().max() > 1e-3  # lengths differ


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_fresh_reference_costs_nothing_and_adds_nothing(estimator):
    """k = 1, μ = 1: no reference log-probs are passed, and β changes neither loss nor gradient."""
    step = replace(make_step(), old_logprobs=None, reference_logprobs=None)
    totals = totals_of(step)
    without = policy_loss(step, totals, ObjectiveSettings())
    fresh = policy_loss(step, totals, ObjectiveSettings(beta=0.5, kl_estimator=estimator))
    assert fresh.loss.item() == without.loss.item()
    assert torch.equal(gradients(fresh.loss, step), gradients(without.loss, step))
    assert fresh.metrics.values()["kl"] == 0.0


def test_a_fresh_reference_is_the_old_policy_in_later_iterations():
    step = replace(make_step(), reference_logprobs=None)
    totals = totals_of(step)
    settings = ObjectiveSettings(beta=0.5, num_iterations=2)
    same = replace(step, reference_logprobs=step.old_logprobs)
    implicit, explicit = (policy_loss(batch, totals, settings).loss for batch in (step, same))
    assert implicit.item() == explicit.item()
    plain = policy_loss(step, totals, ObjectiveSettings(num_iterations=2)).loss
    assert (gradients(implicit, step) - gradients(plain, step)).abs().max() > 1e-4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_completions_have_no_gradient_and_no_metric(loss_type):
    settings = of_type(loss_type, **EVERYTHING)
    step = make_step()
    active = step.active
    assert active is not None
    assert step.old_logprobs is not None
    assert step.sampler_logprobs is not None
    # Ratios of e² in the masked completions, above all others: no maximum may show them.
    far = 2.0 * ~active[step.completion]
    step = replace(
        step,
        old_logprobs=step.old_logprobs - far,
        sampler_logprobs=step.sampler_logprobs - 2 * far,
    )
    output = policy_loss(step, totals_of(step), settings)
    silent = ~active[step.completion]
    assert (gradients(output.loss, step)[: len(silent)][silent] == 0).all()
    kept = part_of(step, active.nonzero().flatten().tolist())
    alone = policy_loss(kept, totals_of(step), settings).metrics.values()
    assert output.metrics.values() == pytest.approx(alone, abs=1e-6)


def test_clipping_takes_the_gradient_on_the_binding_side_alone():
    """Ratios 0.5, 1, 2, 2 with both signs of the advantage, clip at 0.8 and 1.28."""
    ratios = [0.5, 1.0, 2.0, 0.5, 1.0, 2.0]
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    logprobs = torch.zeros(6, requires_grad=True)
    old = -torch.tensor(ratios).log()
    batch = TokenBatch(
        logprobs, torch.arange(6), advantages, torch.ones(6, dtype=torch.long), old_logprobs=old
    )
    settings = ObjectiveSettings(num_iterations=2, epsilon_high=0.28)
    output = policy_loss(batch, StepTotals(6, 6, 1), settings)
    output.loss.backward()
    assert logprobs.grad is not None
    # −ρA/6 where the gradient survives: too high with A > 0, and too low with A < 0, are cut.
    expected = [-0.5, -1.0, 0.0, 0.0, 1.0, 2.0]
    assert (6 * logprobs.grad).tolist() == pytest.approx(expected)
    metrics = output.metrics.values()
    assert metrics["clip_ratio/high_mean"] == pytest.approx(1 / 6)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 6)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(2 / 6)
    assert metrics["ratio/max"] == pytest.approx(2.0)
    # delta bounds what min() leaves open: a large ratio with a negative advantage.
    bounded = ObjectiveSettings(num_iterations=2, epsilon_high=0.28, delta=1.5)
    loss = policy_loss(batch, StepTotals(6, 6, 1), bounded).loss
    assert torch.autograd.grad(loss, logprobs)[0][5] == 0


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """ρ = 10, capped at 5: the weight is 5, where the clipped losses give no gradient at all."""
    logprob = torch.zeros(1, requires_grad=True)
    batch = TokenBatch(
        logprob,
        torch.zeros(1, dtype=torch.long),
        torch.ones(1),
        torch.ones(1, dtype=torch.long),
        old_logprobs=-torch.tensor([10.0]).log(),
    )
    output = policy_loss(batch, StepTotals(1, 1, 1), of_type("cispo", num_iterations=2))
    assert torch.autograd.grad(output.loss, logprob)[0].item() == pytest.approx(-5.0)
    assert output.metrics.values()["cispo_clip_ratio"] == 1.0


def test_sampler_mismatch_is_measured_and_its_weight_truncated():
    """Differences of log 2 and log 8 at two tokens: weights 2 and min(8, 3)."""
    trainer = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = TokenBatch(
        trainer,
        torch.zeros(2, dtype=torch.long),
        torch.ones(1),
        torch.tensor([2]),
        sampler_logprobs=trainer.detach() - torch.tensor([2.0, 8.0]).log(),
    )
    totals = StepTotals(1, 2, 2)
    plain = policy_loss(batch, totals, ObjectiveSettings()).metrics.values()
    log2 = math.log(2)
    assert plain["sampling/sampling_logp_difference/mean"] == pytest.approx(2 * log2)
    assert plain["sampling/sampling_logp_difference/max"] == pytest.approx(3 * log2)
    token = policy_loss(batch, totals, ObjectiveSettings(sampler_correction="token"))
    grad = torch.autograd.grad(token.loss, trainer)[0]
    assert grad.tolist() == pytest.approx([-2 / 2, -3 / 2])
    assert token.metrics.values()["sampling/importance_sampling_ratio/capped"] == 0.5
    sequence = policy_loss(
        batch, totals, ObjectiveSettings(sampler_correction="sequence", sampler_correction_cap=20)
    )
    grad = torch.autograd.grad(sequence.loss, trainer)[0]
    assert grad.tolist() == pytest.approx([-16 / 2, -16 / 2])  # 2 × 8, on both tokens


def test_token_advantages_take_the_place_of_those_of_completions():
    step = replace(make_step(), active=None)
    totals = totals_of(step)
    settings = ObjectiveSettings(num_iterations=2)
    spread = replace(
        step,
        token_advantages=step.advantages[step.completion],
        advantages=torch.zeros(len(LENGTHS)),
    )
    one, other = (policy_loss(batch, totals, settings).loss for batch in (step, spread))
    assert torch.equal(gradients(one, step), gradients(other, step))


@pytest.mark.parametrize(
    ("fields", "missing", "message"),
    [
        ({"beta": 0.1, "reference_refresh_every": 5}, "reference_logprobs", "reference_logprobs"),
        ({"entropy_coef": 0.1}, "entropies", "entropies"),
        ({"sampler_correction": "token"}, "sampler_logprobs", "sampler_logprobs"),
    ],
)
def test_a_batch_that_lacks_what_the_settings_need_is_refused(fields, missing, message):
    step = replace(make_step(), **{missing: None})
    with pytest.raises(ValueError, match=message):
        policy_loss(step, totals_of(step), ObjectiveSettings(**fields))


def test_an_empty_batch_has_no_loss():
    """A rank whose share was left out whole still takes part in the step."""
    nothing = torch.zeros(0, requires_grad=True)
    batch = TokenBatch(
        nothing, torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(0, dtype=torch.long)
    )
    output = policy_loss(batch, StepTotals(8, 50, 16), ObjectiveSettings())
    assert output.loss.item() == 0.0
    assert output.metrics.values() == {}


# KL estimators.


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_mean_of_the_kl(name):
    policy, reference = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    mean = (policy.exp() * KL_ESTIMATORS[name](policy, reference)).sum()
    assert mean.item() == pytest.approx(exact.item(), abs=1e-14)


def test_k2_and_k3_are_never_negative_and_agree_near_zero():
    difference = torch.linspace(-3, 3, 101, dtype=torch.float64)
    zero = torch.zeros_like(difference)
    assert (KL_ESTIMATORS["k2"](difference, zero) >= 0).all()
    assert (k3(difference, zero) >= 0).all()
    small = torch.tensor([1e-3], dtype=torch.float64)
    # They differ by d³/6 to leading order.
    gap = KL_ESTIMATORS["k2"](small, small * 0) - k3(small, small * 0)
    assert gap.item() == pytest.approx(1e-9 / 6, rel=1e-3)


def test_k3_of_a_tiny_difference_is_not_lost_to_rounding():
    """exp(d) − d − 1 in float32 is 0 or 6e-8 at d = 1e-4; expm1 keeps the first digits."""
    difference = torch.tensor([1e-4])
    assert k3(torch.zeros(1), difference).item() == pytest.approx(5e-9, rel=0.01)


def test_penalties_sum_over_each_completions_tokens():
    completion = torch.tensor([0, 2, 0, 2, 2])
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0], requires_grad=True)
    found = kl_penalties(logprobs, torch.zeros(5), completion, 3)
    assert found.tolist() == [-4.0, 0.0, -11.0]
    assert not found.requires_grad
