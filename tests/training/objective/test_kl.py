"""The KL estimators: their means, their signs, their precision, and their sums by completion."""

from __future__ import annotations

import pytest
import torch

from vlm_grpo.training.objective.kl import KL_ESTIMATORS, k3


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_equal_the_kl_on_average(name):
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


def test_k3_keeps_precision_for_small_differences():
    """exp(d) − d − 1 in float32 is 0 or 6e-8 at d = 1e-4; expm1 keeps the first digits."""
    difference = torch.tensor([1e-4])
    assert k3(torch.zeros(1), difference).item() == pytest.approx(5e-9, rel=0.01)
