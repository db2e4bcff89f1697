"""Gaussian noise on images, as the forward process of a diffusion model adds it, and masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

MAX_NOISE_STEPS = 999
"""The most diffusion steps, after which little of an image is left."""


@dataclass(frozen=True)
class DiffusionNoise:
    """Noise on an image x of values 0 to 1: √ᾱ_t · x + √(1 − ᾱ_t) · ε with ε standard normal.

    ᾱ_t is the product of 1 − β_i for i = 0 … t; β_i = 10⁻⁵ + (0.005 − 10⁻⁵) · σ(12 i / 999 − 6)
    (visual contrastive decoding, arXiv:2311.16922; NoisyRollout, arXiv:2504.13055).

    Attributes:
        steps: number of diffusion steps t, 1 to ``MAX_NOISE_STEPS``.
        seed: numbers, at least 0, that determine ε.
    """

    steps: int
    seed: tuple[int, ...]

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return an image of the same mode and size with noise."""
        values = np.asarray(image, dtype=np.float32) / 255
        noise = np.random.default_rng(self.seed).standard_normal(values.shape, np.float32)
        places = np.linspace(-6, 6, MAX_NOISE_STEPS + 1)[: self.steps + 1]
        kept = float(np.prod(1 - (1e-5 + (0.5e-2 - 1e-5) / (1 + np.exp(-places)))))
        values = values * kept**0.5 + noise * (1 - kept) ** 0.5
        return Image.fromarray(np.rint(values.clip(0, 1) * 255).astype(np.uint8))


@dataclass(frozen=True)
class PatchMask:
    """A mask that makes some square patches of an image black, each independently.

    Attributes:
        ratio: probability of a patch to be black.
        size: side of a patch, in pixels; patches at the right and lower edge may be cut.
        seed: numbers, at least 0, that determine which patches are black.
    """

    ratio: float
    size: int
    seed: tuple[int, ...]

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return an image of the same mode and size with black patches."""
        shape = [-(-side // self.size) for side in (image.height, image.width)]
        is_black = np.random.default_rng(self.seed).random(shape) < self.ratio
        mask = Image.fromarray(is_black).resize(
            (shape[1] * self.size, shape[0] * self.size), Image.Resampling.NEAREST
        )
        masked = image.copy()
        masked.paste(0, mask=mask.crop((0, 0, *image.size)))
        return masked
