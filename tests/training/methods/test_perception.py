"""Factors of tokens in the policy loss, by entropy and by dependency on the image."""

from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.training.methods.entropy import select_high_entropy
from vlm_grpo.training.methods.perception import weigh_by_dependency
from vlm_grpo.training.objective.losses import image_dependency

LENGTHS = (5, 1, 3, 10)


def test_the_tokens_of_highest_entropy_are_those_of_trl():
    entropies = [tuple(torch.rand(n, dtype=torch.float64).tolist()) for n in LENGTHS]
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


def test_completions_without_images_or_with_equal_dependency_have_factors_of_1():
    settings = PerceptionSettings(top_share=0.4, min_scale=0.9)
    assert (weigh_by_dependency({}, LENGTHS, settings) == 1).all()
    equal = {3: torch.zeros(LENGTHS[3])}
    first, *_, last = weigh_by_dependency(equal, LENGTHS, settings).split(LENGTHS)
    assert sorted(last.tolist()) == [0.0] * 6 + [1.0] * 4
    assert (first == 1).all()


def test_dependency_is_bounded_and_0_where_the_mask_changes_nothing():
    logprobs, masked = torch.tensor([-1.0, -80.0, -1.0]), torch.tensor([-1.0, -1.0, -80.0])
    assert image_dependency(logprobs, masked).tolist() == [0.0, 10.0, 10.0]
