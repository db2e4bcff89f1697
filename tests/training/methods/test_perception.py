"""Factors of tokens in the policy loss, by entropy and by dependency on the image."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.training.methods import entropy, perception
from vlm_grpo.training.methods.entropy import select_high_entropy
from vlm_grpo.training.methods.perception import weigh_by_dependency
from vlm_grpo.training.objective import image_dependency

LENGTHS = (5, 1, 3, 10)


def weigh(
    sampled: list[Tensor], masked: dict[int, Tensor], settings: PerceptionSettings
) -> list[Tensor]:
    """Return the factors by completion."""
    dependency = {row: image_dependency(sampled[row], values) for row, values in masked.items()}
    lengths = [len(values) for values in sampled]
    return [*weigh_by_dependency(dependency, lengths, settings).split(lengths)]


def draw_logprobs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(n, generator=generator, dtype=torch.float64) * 3 for n in LENGTHS]


def expected_factors(sampled: list[Tensor], masked: list[Tensor], settings: Any) -> list[list]:
    """Follow the authors' steps, one completion at a time, with the step in place of their
    mini-batch and micro-batch."""
    divergences = []
    for ours, theirs in zip(sampled, masked, strict=True):
        pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
        differences = [min(max(b - a, -20.0), 20.0) for a, b in pairs]
        divergences.append([min(max(math.exp(d) - d - 1, 0.0), 10.0) for d in differences])
    scores = [sum(row) / len(row) for row in divergences]
    shares = [(score - min(scores)) / (max(scores) - min(scores)) for score in scores]
    lowest = settings.min_scale or 1.0
    highest = lowest + (1 - lowest) / (sum(shares) / len(shares))
    factors = []
    for row, share in zip(divergences, shares, strict=True):
        kept = sorted(row, reverse=True)[: math.ceil(len(row) * (settings.top_share or 1.0))]
        scale = lowest + share * (highest - lowest)
        factors.append([scale if value in kept else 0.0 for value in row])
    return factors


@pytest.mark.parametrize(
    "fields", [{"top_share": 0.4}, {"min_scale": 0.9}, {"top_share": 0.4, "min_scale": 0.5}]
)
def test_factors_follow_the_authors_steps(fields):
    settings = PerceptionSettings(**fields)
    sampled, masked = draw_logprobs(0), draw_logprobs(1)
    found = weigh(sampled, dict(enumerate(masked)), settings)
    for row, expected in enumerate(expected_factors(sampled, masked, settings)):
        assert found[row].tolist() == pytest.approx(expected, rel=1e-6)
    if "top_share" not in fields:
        assert np.mean([row[0].item() for row in found]) == pytest.approx(1.0)


def test_factors_are_scaled_over_all_ranks(monkeypatch):
    settings = PerceptionSettings(min_scale=0.5)
    sampled, masked = draw_logprobs(0), draw_logprobs(1)
    alone = weigh(sampled, dict(enumerate(masked)), settings)
    means = [image_dependency(a, b).mean().item() for a, b in zip(sampled, masked, strict=True)]
    monkeypatch.setattr(perception, "gather_object", lambda own: [*means[:2], *own])
    second = weigh(sampled[2:], dict(enumerate(masked[2:])), settings)
    for row in (0, 1):
        torch.testing.assert_close(second[row], alone[row + 2])


def test_the_tokens_of_highest_entropy_are_those_of_trl(monkeypatch):
    entropies = [tuple((-part).tolist()) for part in draw_logprobs(2)]
    padded = torch.zeros(len(LENGTHS), max(LENGTHS))
    mask = torch.zeros_like(padded)
    for row, values in enumerate(entropies):
        padded[row, : len(values)], mask[row, : len(values)] = torch.tensor(values), 1
    ranks = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    trl: Any = SimpleNamespace(accelerator=ranks)
    expected = GRPOTrainer.get_high_entropy_mask(trl, padded, mask, 1 - 0.3)
    found = select_high_entropy(entropies, LENGTHS, 0.3).split(LENGTHS)
    for row, length in enumerate(LENGTHS):
        assert found[row].tolist() == expected[row, :length].float().tolist()
    assert sum(values.sum() for values in found) == round(0.3 * sum(LENGTHS))
    without = select_high_entropy([*entropies[:3], ()], LENGTHS, 0.3)
    assert (without[-LENGTHS[3] :] == 1).all()
    # The quantile is that of all ranks.
    others = [value for e in entropies[:2] for value in e]
    monkeypatch.setattr(entropy, "gather_object", lambda own: [*others, *own])
    assert select_high_entropy(entropies[2:], LENGTHS[2:], 0.3)[3:].tolist() == found[3].tolist()


def test_completions_without_images_or_with_equal_dependency_have_factors_of_1():
    settings = PerceptionSettings(top_share=0.4, min_scale=0.9)
    sampled = draw_logprobs(0)
    assert all((f == 1).all() for f in weigh(sampled, {}, settings))
    one = weigh(sampled, {3: sampled[3]}, settings)
    assert sorted(one[3].tolist()) == [0.0] * 6 + [1.0] * 4
    assert (one[0] == 1).all()


def test_dependency_is_bounded_and_0_where_the_mask_changes_nothing():
    logprobs, masked = torch.tensor([-1.0, -80.0, -1.0]), torch.tensor([-1.0, -1.0, -80.0])
    assert image_dependency(logprobs, masked).tolist() == [0.0, 10.0, 10.0]
