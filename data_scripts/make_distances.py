"""Drawn scenes about distances in the plane (the task spatial).

World: "distances", whose difficulty is set by dials. Half of the questions ask which shape is
nearest to another, the others how far apart two are, in meters, if the image is ten meters wide.
The evaluation asks about other pairs of colors than the training. Example ``i`` depends on (dials,
seed, split, i) only: ``python -m vlm_grpo.data_scripts.make_distances --count 10 --out DIR``.
"""

from __future__ import annotations

import math
import random
from itertools import combinations
from typing import ClassVar

from pydantic import Field

from vlm_grpo.data_scripts.make_shapes import COLORS, KINDS, SIDE, draw_mask
from vlm_grpo.data_scripts.synthetic import Generator, World, hold_image, is_held_out
from vlm_grpo.types import Example

METERS, RADIUS = 10.0, 7
"""Width of an image in meters, and radius of a shape in pixels."""


class Distances(World):
    levels: ClassVar = {
        "easy": {"shapes": 3, "apart": 12},
        "medium": {"shapes": 4},
        "hard": {"shapes": 4, "apart": 3, "clutter": 6, "noise": 12},
    }

    shapes: int = Field(default=4, ge=3, le=4)
    """Number of shapes, each of another color."""
    apart: int = Field(default=8, ge=1, le=16)
    """Least difference, in pixels, of the distances to the nearest shape and the next one."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        while True:
            colors = rng.sample(list(COLORS), self.shapes)
            places = [
                (rng.uniform(RADIUS, SIDE - RADIUS), rng.uniform(RADIUS, SIDE - RADIUS))
                for _ in colors
            ]
            near = sorted(range(1, self.shapes), key=lambda n: math.dist(places[0], places[n]))
            gaps = [math.dist(places[0], places[n]) for n in near]
            numbers = [list(COLORS).index(colors[n]) for n in (0, near[0])]
            is_free = min(math.dist(*pair) for pair in combinations(places, 2)) > 3 * RADIUS
            if is_free and gaps[1] - gaps[0] >= self.apart and is_held_out(*numbers) == is_new:
                break
        image, gray = self.draw_background((SIDE, SIDE), rng)
        for color, (x, y) in zip(colors, places, strict=True):
            mask = draw_mask(rng.choice(KINDS), (x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS))
            image.paste(self.fade(COLORS[color], gray), mask=mask)
        first, nearest = colors[0], colors[near[0]]
        if rng.random() < 0.5:
            question = f"Which shape is nearest to the {first} one?"
            answer: object = {"options": rng.sample(colors[1:], self.shapes - 1), "answer": nearest}
        else:
            question = (
                f"The image is {METERS:.0f} meters wide. How far is the {first} shape from the "
                f"{nearest} shape in meters, from center to center?"
            )
            answer = f"{gaps[0] * METERS / SIDE:.1f} m"
        return Example(name, (hold_image(self.add_noise(image, rng), name),), question, answer)


draw_examples = Generator("distances", {}, {"distances": Distances})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
