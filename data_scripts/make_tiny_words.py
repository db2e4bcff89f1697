"""Words too small to read in an image that is scaled to its pixel budget, for environments.

World: "tiny_words", one word in a large image. Scaled to 84 × 28 pixels, by
``policy.max_pixels=2352``, it cannot be read, and enlarged it has the size of the images of
``embedded:ocr``; a row's ``evidence`` is its place. With ``useless=true`` it fills the image, so
that a tool is of no use. Example ``i`` depends on (dials, seed, split, i) only:
``python -m vlm_grpo.data_scripts.make_tiny_words --count 10 --out DIR``.
"""

from __future__ import annotations

import random
from typing import ClassVar

from PIL import Image
from pydantic import Field

from vlm_grpo.data_scripts.make_words import QUESTION, SIZE, Words
from vlm_grpo.data_scripts.synthetic import Generator, World, hold_image
from vlm_grpo.types import Example


class TinyWords(World):
    """Words of random capitals in one of many cells; the evaluation has other pairs of letters."""

    levels: ClassVar = {"easy": {"cells": 2}, "medium": {"cells": 3}, "hard": {"cells": 4}}

    cells: int = Field(default=3, ge=2, le=8)
    """Number of cells along each side of the image, of 84 × 28 pixels each."""
    useless: bool = False
    """Whether the word fills the image instead of one cell."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        shared = self.model_dump(include={"noise", "clutter", "contrast"})
        word = Words(**shared).draw(name, rng, is_new)
        small = word.images[0].load()
        width, height = SIZE
        size = width * self.cells, height * self.cells
        x, y = rng.randrange(self.cells) * width, rng.randrange(self.cells) * height
        box = [x, y, x + width, y + height]
        if self.useless:
            image, box = small.resize(size, Image.Resampling.BICUBIC), [0, 0, *size]
        else:
            image = Image.new("RGB", size, small.getpixel((0, 0)))
            image.paste(small, (x, y))
        return Example(
            name, (hold_image(image, name),), QUESTION, word.answer, meta={"evidence": [box]}
        )


draw_examples = Generator("tiny-words", {}, {"tiny_words": TinyWords})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
