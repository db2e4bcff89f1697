"""Bar charts for the task ``numeric``: a bar's value, a difference, or the highest bar's color.

The world "charts" has dials. Its evaluation asks about other compositions than training: other
pairs of a bar's color and its value, and of the colors of two compared bars.

Example ``i`` depends on (dials, seed, split, i) only, so any prefix can be drawn anywhere:
``python -m vlm_grpo.data_scripts.make_charts --task charts:easy --count 1000 --out DIR``.
"""

from __future__ import annotations

import random
from typing import ClassVar, Literal

from PIL import Image, ImageDraw
from pydantic import Field

from vlm_grpo.data_scripts.make_shapes import COLORS, SIDE
from vlm_grpo.data_scripts.synthetic import Generator, World, hold_image, is_held_out
from vlm_grpo.types import Example

Question = Literal["value", "difference", "highest"]
QUESTIONS: tuple[Question, ...] = ("value", "difference", "highest")


class Charts(World):
    """Bars of different colors and values on one line, with a mark for every unit at the left."""

    levels: ClassVar = {
        "easy": {"bars": 2, "top": 4, "questions": 1},
        "medium": {"bars": 3, "top": 6},
        "hard": {"bars": 4, "top": 9, "clutter": 8, "noise": 20, "contrast": 0.7},
    }

    bars: int = Field(default=3, ge=2, le=len(COLORS))
    """Largest number of bars; the smallest is 2."""
    top: int = Field(default=6, ge=4, le=12)
    """Largest value of a bar; the smallest is 1."""
    questions: int = Field(default=len(QUESTIONS), ge=1, le=len(QUESTIONS))
    """Number of kinds of questions: the value of a bar, then also the difference of two bars, then
    also the color of the highest bar."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        kind = rng.choice(QUESTIONS[: self.questions])
        while True:  # start over if the composition belongs to the other split
            count = rng.randint(2, self.bars)
            colors = rng.sample(tuple(COLORS), count)
            values = rng.sample(range(1, self.top + 1), count)
            bars = dict(zip(colors, values, strict=True))
            high, low = sorted(colors[:2], key=lambda color: -bars[color])
            asked = max(bars, key=bars.__getitem__) if kind == "highest" else colors[0]
            other = _number(low) if kind == "difference" else bars[asked]
            asked = high if kind == "difference" else asked
            if is_held_out(_number(asked), other) == is_new:
                break
        question, answer = {
            "value": (f"What is the value of the {asked} bar?", bars[asked]),
            "difference": (
                f"How much higher is the {high} bar than the {low} bar?",
                bars[high] - bars[low],
            ),
            "highest": ("What is the color of the highest bar?", asked),
        }[kind]
        order = rng.sample(colors, count)
        image = self.paint({color: bars[color] for color in order}, rng)
        return Example(
            id=name,
            images=(hold_image(image, name),),
            question=question,
            answer=answer,
            meta={"kind": kind},
        )

    def paint(self, bars: dict[str, int], rng: random.Random) -> Image.Image:
        """Paint bars of random widths, so that few charts are equal, from left to right; a unit has
        the same height in every chart of a world."""
        image, gray = self.draw_background((SIDE, SIDE), rng)
        pen = ImageDraw.Draw(image)
        unit, width = (SIDE - 8) // self.top, (SIDE - 8) // self.bars
        floor = SIDE - 3
        pen.line((4, floor, SIDE - 3, floor), fill=(255, 255, 255))
        for value in range(1, self.top + 1):
            pen.line((2, floor - value * unit, 5, floor - value * unit), fill=(255, 255, 255))
        for place, (color, value) in enumerate(bars.items()):
            left = 8 + place * width + rng.randint(0, 4)
            right = left + rng.randint(width // 2, width - 6)
            box = (left, floor - value * unit, right, floor - 1)
            pen.rectangle(box, fill=self.fade(COLORS[color], gray))
        return self.add_noise(image, rng)


def _number(color: str) -> int:
    return tuple(COLORS).index(color)


draw_examples = Generator("charts", {}, {"charts": Charts})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
