"""Small words and shapes in large images, for environments and a teacher that sees the crop.

Worlds: "tiny_words", one word, and "tiny_objects", rows of shapes, in cells of a large image; a
row's ``evidence`` is the cell that the question is about, which has the size of the images of
``embedded:ocr``. Scaled to 84 × 28 pixels, by ``policy.max_pixels=2352``, a word cannot be read.
With ``useless=true`` it fills the image, so that a tool is of no use. Example ``i`` depends on
(dials, seed, split, i) only: ``python -m vlm_grpo.data_scripts.make_tiny_words --count 10
--out DIR``.
"""

from __future__ import annotations

import random
from typing import ClassVar

from PIL import Image
from pydantic import Field

from vlm_grpo.data_scripts.make_shapes import COLORS, KINDS, draw_mask
from vlm_grpo.data_scripts.make_words import QUESTION, SIZE, Words
from vlm_grpo.data_scripts.synthetic import Generator, World, hold_image, sample_line
from vlm_grpo.types import Example

ROW = 3  #: Number of shapes in a row


class Cells(World):
    """An image of many cells; the question is about one of them."""

    levels: ClassVar = {"easy": {"cells": 2}, "medium": {"cells": 3}, "hard": {"cells": 4}}

    cells: int = Field(default=3, ge=1, le=8)
    """Number of cells along each side of the image, of 84 × 28 pixels each."""

    def sample_boxes(self, count: int, rng: random.Random) -> list[list[int]]:
        """Sample the boxes of different cells in pixels, of all cells if there are fewer."""
        width, height = SIZE
        cells: list[tuple[int, int]] = []
        while len(cells) < min(count, self.cells**2):
            cell = rng.randrange(self.cells), rng.randrange(self.cells)
            cells += [cell] * (cell not in cells)
        return [[x * width, y * height, (x + 1) * width, (y + 1) * height] for x, y in cells]

    def build_example(
        self, name: str, image: Image.Image, question: str, answer: str, box: list[int]
    ) -> Example:
        images = (hold_image(image, name),)
        return Example(name, images, question, answer, meta={"evidence": [box]})


class TinyWords(Cells):
    """Words of random capitals in one of many cells; the evaluation has other pairs of letters."""

    useless: bool = False
    """Whether the word fills the image instead of one cell."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        shared = self.model_dump(include={"noise", "clutter", "contrast"})
        word = Words(**shared).draw(name, rng, is_new)
        small = word.images[0].load()
        size = SIZE[0] * self.cells, SIZE[1] * self.cells
        (box,) = self.sample_boxes(1, rng)
        if self.useless:
            image, box = small.resize(size, Image.Resampling.BICUBIC), [0, 0, *size]
        else:
            image = Image.new("RGB", size, small.getpixel((0, 0)))
            image.paste(small, (box[0], box[1]))
        return self.build_example(name, image, QUESTION, word.answer, box)


class TinyObjects(Cells):
    """Rows of three small shapes of one kind, each row in a cell of its own; the question is about
    the colors of one kind, and the evaluation has other pairs of neighboring colors."""

    rows: int = Field(default=2, ge=1, le=len(KINDS))
    """Largest number of rows, in cells of their own; each has another kind of shapes."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        size = SIZE[0] * self.cells, SIZE[1] * self.cells
        image, gray = self.draw_background(size, rng)
        kinds, boxes = rng.sample(KINDS, self.rows), self.sample_boxes(self.rows, rng)
        answers = []
        for kind, (left, top, _, _) in zip(kinds, boxes, strict=False):
            colors = sample_line(tuple(COLORS), ROW, ROW, is_new, rng)
            for place, color in enumerate(colors):
                side = rng.randint(12, 16)
                x = left + place * SIZE[1] + rng.randint(2, SIZE[1] - 2 - side)
                y = top + rng.randint(2, SIZE[1] - 2 - side)
                shape = draw_mask(kind, (0, 0, side, side)).crop((0, 0, side, side))
                image.paste(self.fade(COLORS[color], gray), (x, y), shape)
            answers.append(" ".join(colors))
        question = f"Which colors are the {kinds[0]}s?"
        return self.build_example(name, self.add_noise(image, rng), question, answers[0], boxes[0])


draw_examples = Generator("tiny-words", {}, {"tiny_words": TinyWords, "tiny_objects": TinyObjects})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
