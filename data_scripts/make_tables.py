"""Small tables for the task ``table``: a row of words in capitals above rows of numbers.

The world "tables" has dials. Its answers are markdown, one row a line (``AB|CD``), and its
evaluation has other columns than training: other pairs of a word's and a number's first character.

Example ``i`` depends on (dials, seed, split, i) only, so any prefix can be drawn anywhere:
``python -m vlm_grpo.data_scripts.make_tables --task tables:easy --count 1000 --out DIR``.
"""

from __future__ import annotations

import random
from typing import ClassVar

from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from vlm_grpo.data_scripts.make_words import DIGITS, LETTERS
from vlm_grpo.data_scripts.synthetic import Generator, World, hold_image, is_held_out
from vlm_grpo.types import Example

CELL = (56, 28)  #: Width and height of a cell in pixels: 2 × 1 image tokens of a Qwen-VL
QUESTION = "What does the table say?"
POINTS = 20  #: Font size


class Tables(World):
    """Tables with lines: words in the first row, numbers in the others."""

    levels: ClassVar = {
        "easy": {"longest": 1},
        "medium": {"longest": 2},
        "hard": {"rows": 3, "longest": 3, "clutter": 8, "noise": 20, "contrast": 0.7},
    }

    rows: int = Field(default=2, ge=2, le=4)
    """Number of rows."""
    columns: int = Field(default=2, ge=1, le=3)
    """Number of columns."""
    longest: int = Field(default=2, ge=1, le=3)
    """Largest number of characters of a cell; the smallest is 1."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        while True:  # start over if a column belongs to the other split
            rows = [
                [self.sample_text(DIGITS if row else LETTERS, rng) for _ in range(self.columns)]
                for row in range(self.rows)
            ]
            pairs = zip(*rows[:2], strict=True)
            held_out = [is_held_out(_number(word[0]), int(digits[0])) for word, digits in pairs]
            if any(held_out) == is_new:
                break
        image = self.paint(rows, rng)
        answer = "\n".join("|".join(row) for row in rows)
        return Example(id=name, images=(hold_image(image, name),), question=QUESTION, answer=answer)

    def sample_text(self, alphabet: str, rng: random.Random) -> str:
        """Sample the text of a cell."""
        return "".join(rng.choices(alphabet, k=rng.randint(1, self.longest)))

    def paint(self, rows: list[list[str]], rng: random.Random) -> Image.Image:
        """Paint a table whose cells have one size."""
        width, height = CELL
        image, gray = self.draw_background((self.columns * width, self.rows * height), rng)
        pen = ImageDraw.Draw(image)
        color = self.fade([rng.randint(215, 255)] * 3, gray)
        font = ImageFont.load_default(POINTS)
        for row, texts in enumerate(rows):
            for column, text in enumerate(texts):
                x, y = column * width, row * height
                pen.rectangle(
                    (x, y, x + width - 1, y + height - 1), outline=self.fade((0,) * 3, gray)
                )
                left, top, _, bottom = pen.textbbox((0, 0), text, font=font)
                place = (x + rng.randint(4, 7) - left, y + (height - bottom + top) // 2 - top)
                pen.text(place, text, fill=color, font=font)
        return self.add_noise(image, rng)


def _number(letter: str) -> int:
    return LETTERS.index(letter)


draw_examples = Generator("tables", {}, {"tables": Tables})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
