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
        values = np.asarray(image)
        shape = [-(-side // self.size) for side in values.shape[:2]]
        is_black = np.random.default_rng(self.seed).random(shape) < self.ratio
        pixels = is_black.repeat(self.size, axis=0).repeat(self.size, axis=1)
        return Image.fromarray(np.where(self._fit(pixels, values), 0, values).astype(values.dtype))

    @staticmethod
    def _fit(pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Cut the mask to the size of the image, and repeat it for each channel."""
        height, width, *channels = values.shape
        cut = pixels[:height, :width]
        return cut[..., None] if channels else cut
