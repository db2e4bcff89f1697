"""Images with black patches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image


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
