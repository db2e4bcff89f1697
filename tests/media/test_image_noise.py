"""Noise and black patches on images: their formulas, and what they depend on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from vlm_grpo.media.image_noise import MAX_NOISE_STEPS, DiffusionNoise, PatchMask


def kept_variance(steps: int) -> float:
    """Return the product of 1 − β over the steps, one after the other."""
    kept = 1.0
    for number in range(steps + 1):
        gate = 1 / (1 + math.exp(-(-6 + 12 * number / 999)))
        kept *= 1 - (gate * (0.5e-2 - 1e-5) + 1e-5)
    return kept


@pytest.mark.parametrize("steps", [1, 100, 500, MAX_NOISE_STEPS])
def test_noise_follows_the_diffusion_formula(steps: int) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    found = DiffusionNoise(steps, (1, 2))(Image.fromarray(pixels))
    kept = kept_variance(steps)
    drawn = np.random.default_rng([1, 2]).standard_normal((40, 30, 3), np.float32).astype(float)
    exact = math.sqrt(kept) * pixels / 255 + math.sqrt(1 - kept) * drawn
    assert (found.mode, found.size) == ("RGB", (30, 40))
    # Half a level of rounding to 8 bits, and float32's own.
    assert np.abs(np.asarray(found) - 255 * exact.clip(0, 1)).max() < 0.5 + 1e-3


def test_noise_depends_on_its_seed_alone() -> None:
    image = Image.new("RGB", (8, 8), (90, 120, 150))
    first, again, other = (
        DiffusionNoise(300, seed)(image).tobytes() for seed in ((0, 1), (0, 1), (1, 0))
    )
    assert first == again != other


def test_more_steps_hide_more_of_an_image() -> None:
    gray = Image.new("RGB", (64, 64), (128, 128, 128))
    spreads = [np.asarray(DiffusionNoise(steps, (0,))(gray)).std() for steps in (1, 200, 500, 900)]
    assert spreads == sorted(spreads)
    # √(1 − ᾱ) · 255 before clipping at the ends of the range.
    assert spreads[1] == pytest.approx(math.sqrt(1 - kept_variance(200)) * 255, rel=0.03)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_whole_patches_are_black_or_unchanged(mode: str) -> None:
    values = np.random.default_rng(0).integers(1, 256, (31, 45), dtype=np.uint8)
    image = Image.fromarray(values).convert(mode)
    found, before = np.asarray(PatchMask(0.5, 10, (3, 1))(image)), np.asarray(image)
    assert found.shape == before.shape
    kinds = []
    for top in range(0, 31, 10):
        for left in range(0, 45, 10):
            patch = found[top : top + 10, left : left + 10]
            own = before[top : top + 10, left : left + 10]
            assert (patch == 0).all() or (patch == own).all()
            kinds.append(bool((patch == 0).all()))
    assert 0 < sum(kinds) < len(kinds) == 20


def test_the_seed_sets_the_patches_and_the_ratio_their_share() -> None:
    image = Image.new("RGB", (500, 500), "white")
    one, same, other = (PatchMask(0.6, 5, seed)(image) for seed in ((1, 2), (1, 2), (1, 3)))
    assert one.tobytes() == same.tobytes() != other.tobytes()
    assert np.mean(np.asarray(one) == 0) == pytest.approx(0.6, abs=0.02)
    assert not np.asarray(PatchMask(1.0, 14, (0,))(image)).any()
