"""Factors of tokens in the policy loss, by entropy and by dependency on the image."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.training.methods.entropy import select_high_entropy
from vlm_grpo.training.methods.perception import weigh_by_dependency
from vlm_grpo.training.objective.losses import image_dependency

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


def test_the_tokens_of_highest_entropy_are_those_of_trl():
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
