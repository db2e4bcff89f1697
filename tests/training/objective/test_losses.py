"""Losses: invariance to splits and order, skipped and masked completions, clipping, metrics."""

import math
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import jaxtyping
import pytest
import torch
from gradients import gradient
from groups import make_tokens
from jaxtyping import Float
from torch import Tensor
from type_checks import check_types

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.training.methods import Method, build_methods, find_methods
from vlm_grpo.training.objective import losses
from vlm_grpo.training.objective.kl import k3
from vlm_grpo.training.objective.losses import completion_weights, compute_loss, policy_loss
from vlm_grpo.training.objective.token_batch import MetricAccumulator, StepTotals, TokenBatch

LENGTHS = torch.tensor([9, 1, 4, 16, 2, 7, 16, 3])
MAX_LENGTH = 16
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
ALL_TERMS: dict[str, Any] = {"num_iterations": 2, "entropy_coef": 0.01}
ALL_TERMS |= {"beta": 0.1, "reference_refresh_every": "never", "sampler_correction": "token"}


def make_settings(loss_type: str, **fields: Any) -> ObjectiveSettings:
    level = {"luspo": "sequence", "vespo": "token"}.get(loss_type)  # of those that take only one
    own = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    forced = {"importance_sampling_level": level} if level else {}
    return ObjectiveSettings(**{"loss_type": loss_type, **own, **fields, **forced})


def make_step(dtype: torch.dtype = torch.float32) -> TokenBatch:
    """Build a step of eight completions, two of them masked out, with every optional tensor."""
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


def select(step: TokenBatch, completions: list[int]) -> TokenBatch:
    """Build a micro-batch of these completions in this order."""
    tokens = torch.cat([(step.completion == c).nonzero().flatten() for c in completions])
    own = {name: value for name, value in vars(step).items() if isinstance(value, Tensor)}
    of_completions = "advantages", "lengths", "active"
    part = {n: x[completions if n in of_completions else tokens] for n, x in own.items()}
    part["completion"] = torch.arange(len(completions)).repeat_interleave(part["lengths"])
    return replace(step, **part)


def count_totals(step: TokenBatch) -> StepTotals:
    return StepTotals.from_lengths(step.lengths, step.active, MAX_LENGTH)


def gradients(loss: Tensor, step: TokenBatch) -> Tensor:
    return gradient(loss, step.logprobs, step.entropies)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("micro_batches", [2, 8])
def test_neither_the_split_nor_the_order_changes_a_step(loss_type, level, micro_batches):
    """Loss, gradient and metrics of the step, split into micro-batches in a shuffled order."""
    settings = make_settings(loss_type, importance_sampling_level=level, **ALL_TERMS)
    step = make_step()
    totals = count_totals(step)
    unsplit = policy_loss(step, totals, settings)
    order = torch.randperm(len(LENGTHS)).tolist()
    size = len(order) // micro_batches
    parts = [
        policy_loss(select(step, order[i : i + size]), totals, settings)
        for i in range(0, len(order), size)
    ]
    assert len(parts) == micro_batches
    loss = torch.stack([part.loss for part in parts]).sum()
    assert loss.item() == pytest.approx(unsplit.loss.item(), abs=1e-6)
    # float32 holds 7 digits and gradients here are below 0.1.
    assert (gradients(loss, step) - gradients(unsplit.loss, step)).abs().max() < 1e-6
    metrics = reduce(add, [part.metrics for part in parts]).values()
    assert metrics == pytest.approx(unsplit.metrics.values(), abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_completions_without_advantage_may_be_skipped(loss_type):
    """The gradient is the same without them, as long as the totals count them."""
    settings = make_settings(loss_type, num_iterations=2)
    step: Any = make_step()
    zero = torch.tensor([True, False, False, True, True, False, False, False])
    step = replace(step, advantages=-step.advantages.abs().masked_fill(zero, 0.0))
    kept = step.active & (step.advantages != 0)
    assert kept.tolist() == [False, True, False, False, False, True, False, True]
    full = gradients(policy_loss(step, count_totals(step), settings).loss, step)
    part = select(step, kept.nonzero().flatten().tolist())
    skipped = gradients(policy_loss(part, count_totals(step), settings).loss, step)
    assert torch.equal(full, skipped)


def test_a_fresh_reference_adds_nothing_and_is_the_old_policy_in_later_iterations():
    """k = 1, μ = 1: β changes neither loss nor gradient, without any reference log-probs."""
    step = replace(make_step(), reference_logprobs=None)
    totals, first = count_totals(step), replace(step, old_logprobs=None)
    for estimator in ("k2", "k3"):
        without = policy_loss(first, totals, ObjectiveSettings())
        fresh = policy_loss(first, totals, ObjectiveSettings(beta=0.5, kl_estimator=estimator))
        assert fresh.loss.item() == without.loss.item()
        assert torch.equal(gradients(fresh.loss, step), gradients(without.loss, step))
        assert fresh.metrics.values()["kl"] == 0.0
    settings = ObjectiveSettings(beta=0.5, num_iterations=2)
    given = replace(step, reference_logprobs=step.old_logprobs)
    implicit, explicit = (policy_loss(batch, totals, settings).loss for batch in (step, given))
    assert implicit.item() == explicit.item()
    plain = policy_loss(step, totals, ObjectiveSettings(num_iterations=2)).loss
    assert (gradients(implicit, step) - gradients(plain, step)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("correction", "name", "square"), [("token_mask", "rejected", 4), ("token", "capped", 4 + 9)]
)
def test_shares_of_capped_and_rejected_sampler_weights_count_all_tokens(correction, name, square):
    """Weights of 2 and 8 at two tokens, above the cap of 3; TRL has neither mean of squares."""
    logprobs, weights = torch.tensor([-1.0, -1.0]), torch.tensor([2.0, 8.0])
    batch = make_tokens(logprobs, [2], sampler_logprobs=logprobs - weights.log())
    settings = ObjectiveSettings(sampler_correction=correction)
    metrics = policy_loss(batch, StepTotals(1, 2, 2), settings).metrics.values()
    found = [metrics[f"sampling/importance_sampling_ratio/{n}"] for n in (name, "mean_square")]
    assert found == pytest.approx([1 / 2, square / 2])


def test_the_logged_kl_has_the_ratio_of_the_token_at_any_level_and_k3_the_first_digits():
    """Only with it is k3 unbiased once the policy has moved; TRL logs that of the completion."""
    step, levels = make_step(), ("token", "sequence")
    settings = (make_settings("grpo", importance_sampling_level=n, **ALL_TERMS) for n in levels)
    found = [policy_loss(step, count_totals(step), own).metrics.values() for own in settings]
    assert found[0]["kl"] == found[1]["kl"]
    assert found[0]["ratio/max"] != found[1]["ratio/max"]
    # exp(d) − d − 1 in float32 is 0 or 6e-8 at d = 1e-4; expm1 keeps the first digits.
    assert k3(torch.zeros(1), torch.tensor([1e-4])).item() == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"beta": 0.1, "reference_refresh_every": 5}, "reference_logprobs"),
        ({"entropy_coef": 0.1}, "entropies"),
        ({"sampler_correction": "token"}, "sampler_logprobs"),
    ],
)
def test_a_batch_without_a_tensor_that_the_settings_need_is_refused(fields, missing):
    step = replace(make_step(), **{missing: None})
    with pytest.raises(ValueError, match=missing):
        policy_loss(step, count_totals(step), ObjectiveSettings(**fields))


def test_an_empty_batch_has_no_loss():
    """A rank whose completions were all skipped still takes part in the step."""
    none = torch.zeros(0, dtype=torch.long)
    batch = TokenBatch(torch.zeros(0, requires_grad=True), none, torch.zeros(0), none)
    output = policy_loss(batch, StepTotals(8, 50, 16), ObjectiveSettings())
    assert (output.loss.item(), output.metrics.values()) == (0.0, {})


def test_no_term_of_a_method_is_left_out():
    """The settings name every term that a method adds; otherwise it would be absent unnoticed."""
    fields = {"distillation": {"teacher": "any"}, "perception": {"kl_coef": 0.1}}
    settings, step = ObjectiveSettings(**fields), make_step()
    methods = build_methods({"objective": settings})
    arguments = step.lengths, step.active, count_totals(step), settings
    weights = completion_weights(*arguments, methods)
    with pytest.raises(ValueError, match=r"adds a term .* give methods=build_methods"):
        completion_weights(*arguments)
    assert settings.method_terms == weights.keys() & methods.keys() == {*fields}
    # A method whose settings are in its file is selected by name, as that of a user is.
    adding = (m for m in find_methods() if m.add_weights is not Method.add_weights)
    assert {method.name for method in adding if method.block} == {*fields}


FIRST = MetricAccumulator(
    means={"kl": (torch.tensor(3.0), torch.tensor(2.0)), "reward": (1.0, 1)},
    minima={"min_length": 4},
    maxima={"max_length": 9, "ratio": torch.tensor(1.5)},
    sums={"failed": 1},
    samples={"exact": (1.0, 0.0)},
)
SECOND = MetricAccumulator(
    means={
        "kl": (torch.tensor(1.0), torch.tensor(2.0)),
        "entropy": (0.0, 0),
        "n": (torch.tensor(3), 4),
    },
    minima={"min_length": 2},
    maxima={"max_length": 5, "ratio": torch.tensor(1.25)},
    sums={"failed": 2, "decoded": 7},
    samples={"exact": (0.5,), "format": ()},
)


def test_two_parts_add_up_to_the_metrics_of_both_read_at_once_for_each_dtype(monkeypatch):
    reads, cpu, both = [], torch.Tensor.cpu, FIRST + SECOND
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: [cpu(x), reads.append(x.dtype)][0])
    for values in (both.values(), both.cpu().values()):
        assert values.pop("exact/std") == pytest.approx(0.5)  # of 1, 0 and 1/2
        assert all(math.isnan(values.pop(name)) for name in ("format/mean", "format/std"))
        numbers = {"min_length": 2, "max_length": 9, "failed": 3, "decoded": 7, "n": 0.75}
        assert values == {**numbers, "kl": 1.0, "reward": 1.0, "ratio": 1.5, "exact/mean": 0.5}
    assert sorted(map(str, reads)) == ["torch.float32", "torch.int64"]
    # A mean over nothing is left out, or given a value; a maximum with NaN is NaN.
    assert "entropy" not in SECOND.values()
    assert math.isnan(SECOND.values(empty=math.nan)["entropy"])
    broken = MetricAccumulator(maxima={"ratio": torch.tensor(math.nan)})
    for total in (FIRST + broken, broken + FIRST):
        assert math.isnan(total.values()["ratio"])


def test_metrics_leave_out_masked_completions_and_clip_none_without_advantage():
    """Of three tokens with weight 1/8 and ratio 2, one has an advantage and is not masked."""
    logprobs, active = torch.full((3,), -1.0), torch.tensor([True, False, True])
    given = {"old_logprobs": logprobs - math.log(2), "active": active}
    given["sampler_logprobs"] = logprobs + torch.tensor([0, 9.0, 0])
    batch = make_tokens(logprobs, [1] * 3, torch.tensor([1.0, 1.0, 0.0]), **given)
    settings = ObjectiveSettings(sampler_correction="token", num_iterations=2)
    found = policy_loss(batch, StepTotals(3, 2, 1), settings).metrics.values()
    assert found["sampling/importance_sampling_ratio/min"] == pytest.approx(1 / 2)
    assert found["clip_ratio/high_mean"] == 1 / 2


def test_metrics_of_methods_leave_out_masked_completions():
    step: Any = make_step(torch.float64)
    numbers = torch.arange(len(step.logprobs), dtype=torch.float64)

    class Half(Method):
        def metrics(self, batch: TokenBatch, old: Tensor) -> dict[str, Tensor]:
            return {"half": batch.scores["half"]}

    batch = replace(step, scores={"half": numbers}, weights={"policy": torch.ones(len(numbers))})
    found = compute_loss(batch, make_settings("grpo"), methods={"half": Half(None)}).metrics
    kept = numbers[step.active[step.completion]]
    assert found.values()["half"] == pytest.approx(kept.mean().item())


def test_vespo_bounds_the_change_of_each_token():
    """As in TRL, before the sum: a change of 30 counts as one of 20 beside one of -15."""

    def compute(*changes: float) -> Tensor:
        logprobs = torch.tensor([-1.0, -2.0]).double()
        batch = make_tokens(logprobs, [2], old_logprobs=logprobs - torch.tensor(changes).double())
        return losses.vespo_loss(logprobs, batch, make_settings("vespo"))

    assert torch.equal(compute(30, -15), compute(20, -15))
    assert not torch.equal(compute(30, -15), compute(15, -15))


def test_tensors_of_a_wrong_shape_are_refused_also_by_inner_functions():
    """Whose checks are generated at the first call of the function around them only."""

    def build() -> Any:
        @jaxtyping.jaxtyped(typechecker=check_types)
        def add(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
            return a + b

        return add

    for function in (k3, build(), build()):
        function(torch.zeros(2), torch.zeros(2))
        with pytest.raises(jaxtyping.TypeCheckError, match="parameters"):
            function(torch.zeros(2), torch.zeros(1))
