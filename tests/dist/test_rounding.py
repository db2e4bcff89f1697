"""Stochastic rounding, and training in bfloat16 with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlm_grpo.config.optim import OptimSettings
from vlm_grpo.dist import rounding
from vlm_grpo.dist.optimizer import build_optimizer
from vlm_grpo.dist.rounding import round_stochastically


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("value", [1 + 2**-10, -(1 + 3 * 2**-10), 1e-30, -3.3e5])
def test_a_number_becomes_one_of_its_neighbors_and_is_right_in_the_mean(value):
    values = torch.full((1 << 16,), value)
    rounded = round_stochastically(values, make_generator())
    assert rounded.dtype == torch.bfloat16
    lower, upper = sorted(set(rounded.tolist()))  # both neighbors, and nothing else
    assert lower < values[0].item() < upper
    spacing = upper - lower
    # The error of a mean of 2^16 draws with a standard deviation of at most half the spacing.
    assert abs(rounded.double().mean().item() - values[0].item()) < 5 * 0.5 * spacing / 256


def test_numbers_of_bfloat16_stay_and_equal_seeds_round_equally(monkeypatch):
    values = torch.randn(3, 1000, generator=make_generator(1))
    exact = values.to(torch.bfloat16)
    assert torch.equal(round_stochastically(exact.float(), make_generator()), exact)
    first, second, other = (round_stochastically(values, make_generator(s)) for s in (2, 2, 3))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    monkeypatch.setattr(rounding, "ROUNDED_AT_ONCE", 700)  # several chunks, the last one smaller
    chunked = round_stochastically(values, make_generator(2))
    assert (chunked.float() - values).abs().max() < values.abs().max() * 2**-7
    assert not torch.equal(chunked[0], chunked[1])


def train(dtype: torch.dtype, seed: int = 0, **optim: Any) -> Tensor:
    """Return 512 weights that began as 1 after 200 updates of 10^-4 each."""
    weight = nn.Parameter(torch.ones(8, 64, dtype=dtype))
    optimizer = build_optimizer([("layers.0.w", weight)], OptimSettings(lr=1e-4, **optim), seed)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach()


def test_updates_below_the_precision_of_bfloat16_are_kept_in_the_mean():
    """Each update is 1/40 of the spacing of bfloat16 below 1: rounding to the nearest drops it."""
    assert (torch.ones((), dtype=torch.bfloat16) - 1e-4).item() == 1
    exact = train(torch.float32).mean().item()
    assert exact == pytest.approx(0.98, abs=1e-3)
    rounded = train(torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    # A weight's error after 200 roundings is 2^-8 · sqrt(5) or so, that of 512 weights 4e-4.
    assert rounded.double().mean().item() == pytest.approx(exact, abs=2e-3)
    assert len(rounded.unique()) > 3  # every weight has random bits of its own


def test_the_random_bits_depend_on_the_seed_the_weight_and_the_update():
    first, again = train(torch.bfloat16, seed=1), train(torch.bfloat16, seed=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, train(torch.bfloat16, seed=2))
    weights = [(f"layers.{i}.w", nn.Parameter(torch.ones(8, 64).bfloat16())) for i in range(2)]
    optimizer = build_optimizer(weights, OptimSettings(lr=2e-3), 0)
    changes = []
    for _ in range(2):
        before = [weight.detach().clone() for _, weight in weights]
        for _, weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        changes.append([w.detach() - old for (_, w), old in zip(weights, before, strict=True)])
    (a, b), (c, _) = changes
    assert not torch.equal(a, b)  # of two weights
    assert not torch.equal(a, c)  # of two updates


def test_the_moments_are_rounded_right_in_the_mean():
    """The second moment falls by 1/1000 per update, which rounding to the nearest would drop."""
    weight = nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16))
    optimizer = build_optimizer([("layers.0.w", weight)], OptimSettings(lr=1e-6), 0)
    for step in range(300):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 0.0)
        optimizer.step()
    square = optimizer.state[weight]["exp_avg_sq"]
    assert square.dtype == torch.bfloat16
    assert square.double().mean().item() == pytest.approx(1e-3 * 0.999**299, rel=0.02)
