"""Drawn stick figures with named points (the task keypoints).

World: "figures", whose difficulty is set by dials. A figure faces the viewer: its left limbs, on
the right of the image, are blue, and its right ones red. The evaluation shows other pairs of a pose
of the arms and one of the legs than the training. Example ``i`` depends on (dials, seed, split, i)
only: ``python -m vlm_grpo.data_scripts.make_figures --count 10 --out DIR``.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar

from PIL import ImageDraw
from pydantic import Field

from vlm_grpo.data_scripts.synthetic import Generator, World, hold_image, is_held_out
from vlm_grpo.types import Example

SIDE = 112
"""Width and height of an image in pixels."""
NAMES = (
    *("nose", "left wrist", "right wrist", "left ankle", "right ankle", "left shoulder"),
    *("right shoulder", "left hip", "right hip", "left elbow", "right elbow", "left knee"),
    "right knee",
)
"""All points; the first ones are asked for."""
ARMS, LEGS = ((15, 15), (90, 90), (165, 165), (60, 150)), ((5, 5), (25, 25), (40, 10), (10, -25))
"""Angles of the upper and the lower part to straight down, outwards, by pose."""
COLORS = {"left": (40, 90, 235), "right": (225, 50, 40)}

Point = tuple[float, float]


class Figures(World):
    levels: ClassVar = {
        "easy": {"points": 5},
        "medium": {"points": 9},
        "hard": {"points": 13, "clutter": 6, "noise": 12},
    }

    points: int = Field(default=9, ge=1, le=len(NAMES))
    """Number of points to locate: the nose, wrists, ankles, shoulders, hips, elbows, knees."""
    bend: int = Field(default=10, ge=0, le=20)
    """Largest difference of a limb from its pose, in degrees."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        image, gray = self.draw_background((SIDE, SIDE), rng)
        poses = [(a, b) for a in range(4) for b in range(4) if is_held_out(a, b) == is_new]
        arms, legs = rng.choice(poses)
        places = self._place(ARMS[arms], LEGS[legs], rng)
        pen, width = ImageDraw.Draw(image), 3
        for side, color in COLORS.items():
            line = [places[f"{side} {part}"] for part in ("wrist", "elbow", "shoulder", "hip")]
            line += [places[f"{side} {part}"] for part in ("knee", "ankle")]
            pen.line(line, fill=self.fade(color, gray), width=width, joint="curve")
        dark = self.fade((20, 20, 20), gray)
        for part in ("shoulder", "hip"):
            pen.line([places[f"{side} {part}"] for side in COLORS], fill=dark, width=width)
        (x, y), radius = places["nose"], 6
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=dark, width=2)
        pen.ellipse((x - 1, y - 1, x + 1, y + 1), fill=dark)
        xs, ys = zip(*places.values(), strict=True)
        gold = {part: [round(edge, 1) for edge in places[part]] for part in NAMES[: self.points]}
        box = [round(edge, 1) for edge in (min(xs), min(ys), max(xs), max(ys))]
        answer = {"points": gold, "box": box}
        return Example(name, (hold_image(self.add_noise(image, rng), name),), "the person", answer)

    def _place(
        self, arms: tuple[int, int], legs: tuple[int, int], rng: random.Random
    ) -> dict[str, Point]:
        """Return where all points are."""
        height = rng.uniform(60, 84)
        x, y = rng.uniform(0.42, 0.58) * SIDE, SIDE / 2 + rng.uniform(-3, 5)
        found: dict[str, Point] = {"nose": (x, y - 0.4 * height)}
        limbs = (
            (("shoulder", "elbow", "wrist"), (0.1, -0.28), arms, 0.16),
            (("hip", "knee", "ankle"), (0.07, 0.02), legs, 0.21),
        )
        for side, sign in (("left", 1), ("right", -1)):
            for parts, (across, down), angles, length in limbs:
                place = (x + sign * across * height, y + down * height)
                found[f"{side} {parts[0]}"] = place
                for part, angle in zip(parts[1:], angles, strict=True):
                    turn = math.radians(angle + rng.uniform(-self.bend, self.bend))
                    place = (
                        place[0] + sign * math.sin(turn) * length * height,
                        place[1] + math.cos(turn) * length * height,
                    )
                    found[f"{side} {part}"] = place
        return found


draw_examples = Generator("figures", {}, {"figures": Figures})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
