"""Factors of tokens in the policy loss, by entropy and by dependency on the image; masks."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_grpo.config.methods import PerceptionSettings
from vlm_grpo.training.methods.entropy import select_high_entropy
from vlm_grpo.training.methods.perception import PatchMask, weigh_by_dependency
from vlm_grpo.training.objective.kl import image_dependency

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


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_whole_patches_are_black_or_unchanged_by_the_seed_and_their_share(mode):
    values = np.random.default_rng(0).integers(1, 256, (31, 45), dtype=np.uint8)
    image = Image.fromarray(values).convert(mode)
    found, before = np.asarray(PatchMask(0.5, 10, (3, 1))(image)), np.asarray(image)
    assert found.shape == before.shape
    kinds = []
    for top, left in product(range(0, 31, 10), range(0, 45, 10)):
        patch, own = (pixels[top : top + 10, left : left + 10] for pixels in (found, before))
        kinds.append(bool((patch == 0).all()))
        assert kinds[-1] or (patch == own).all()
    assert 0 < sum(kinds) < len(kinds) == 20
    image = Image.new("RGB", (500, 500), "white")
    one, same, other = (PatchMask(0.6, 5, seed)(image) for seed in ((1, 2), (1, 2), (1, 3)))
    assert one.tobytes() == same.tobytes() != other.tobytes()
    assert np.mean(np.asarray(one) == 0) == pytest.approx(0.6, abs=0.02)
    assert not np.asarray(PatchMask(1.0, 14, (0,))(image)).any()
