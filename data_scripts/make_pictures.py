"""Drawn pictures without questions, for puzzles made of images alone (the task self_supervised).

World: "pictures" (one large shape of any color), whose difficulty is set by dials. Example ``i``
depends on (dials, seed, split, i) only:
``python -m vlm_grpo.data_scripts.make_pictures --count 10 --out DIR``.
"""

from __future__ import annotations

import random
from typing import ClassVar

from PIL import Image
from pydantic import Field

from vlm_grpo.data_scripts.make_shapes import KINDS, draw_mask
from vlm_grpo.data_scripts.synthetic import (
    BACKGROUND_GRAYS,
    Generator,
    World,
    hold_image,
    is_held_out,
)
from vlm_grpo.types import Example

COLORS = ("red", "green", "blue")  #: names of the channels; a color is named by its largest
_LEAST_DISTANCE = 60  # of a shape's color from the background in one channel
SIDE = 56
"""Width and height of a picture in pixels: 2 × 2 tokens of a Qwen-VL, and as many tiles."""


class Pictures(World):
    """A shape that reaches into every quarter of the picture; the evaluation shows other pairs of a
    color and a kind than the training."""

    levels: ClassVar = {
        "easy": {"kinds": 1},
        "medium": {"kinds": 2},
        "hard": {"kinds": 3, "clutter": 4, "noise": 12},
    }

    kinds: int = Field(default=2, ge=1, le=3)
    """Number of kinds of shapes: 1: circles, 2: and squares, 3: and triangles."""
    offset: int = Field(default=6, ge=0, le=10)
    """Largest distance of the shape's center from that of the picture along an axis, in pixels."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        background = [rng.randint(*BACKGROUND_GRAYS) for _ in range(3)]
        image = Image.new("RGB", (SIDE, SIDE), tuple(background))
        self.draw_clutter(image, sum(background) // 3, rng)
        while True:  # a color that stands out, of a pair of color and kind that may be shown
            kind, channels = rng.randrange(self.kinds), rng.choices(range(256), k=3)
            main = channels.index(max(channels))
            distance = max(abs(a - b) for a, b in zip(channels, background, strict=True))
            if distance >= _LEAST_DISTANCE and is_held_out(main, kind) == is_new:
                break
        size = rng.randint(34, SIDE - 2 * self.offset - 2)
        x, y = ((SIDE - size) // 2 + rng.randint(-self.offset, self.offset) for _ in range(2))
        mask = draw_mask(KINDS[kind], (x, y, x + size, y + size)).crop((0, 0, SIDE, SIDE))
        image.paste(self.fade(channels, sum(background) // 3), mask=mask)
        meta = {"color": COLORS[main], "kind": KINDS[kind]}
        return Example(name, (hold_image(self.add_noise(image, rng), name),), "", None, meta)


draw_examples = Generator("pictures", {}, {"pictures": Pictures})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
