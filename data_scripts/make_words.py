"""Images of random words for OCR.

Example ``i`` depends on (seed, split, i) only, so any prefix can be drawn anywhere:
``python -m vlm_grpo.data_scripts.make_words --count 1000 --seed 0 --out DIR``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from vlm_grpo.data_scripts.synthetic import BACKGROUND_GRAYS, encode_png, make_rng, run_maker
from vlm_grpo.types import Example

TASKS = ("ocr",)
SIZE = (84, 28)
"""Width and height of a word's image in pixels: 3 × 1 image tokens of a Qwen-VL."""

QUESTION = "What does the text say?"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LENGTHS = (3, 4)
"""Smallest and largest number of letters in a word."""

POINTS = 22
"""Font size; a word too wide for the image gets a smaller one."""


def draw_examples(task: str, count: int, seed: int = 0, split: str = "train") -> list[Example]:
    """Draw ``count`` words of random capitals in memory, in Pillow's default font.

    Args:
        task: "ocr" (answer: the word).
        count: number of words, at least 1.
        seed: the same seed gives the same words on every machine.
        split: name of the split; two splits of one seed are independent draws.

    Raises:
        ValueError: the task is unknown or the count is below 1.
    """
    if task not in TASKS:
        raise ValueError(f"there are no words for task {task!r}: choose {' or '.join(TASKS)}")
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    return [
        _draw_word(f"words-{task}-{split}-{i}", make_rng("words", task, seed, split, i))
        for i in range(count)
    ]


def _draw_word(name: str, rng: random.Random) -> Example:
    word = "".join(rng.choices(LETTERS, k=rng.randint(*LENGTHS)))
    return Example(
        id=name,
        images=(encode_png(_render(word, rng), name),),
        question=QUESTION,
        answer=word,
    )


def _render(word: str, rng: random.Random) -> Image.Image:
    """Render a word in a light color on a gray background, near the left edge."""
    gray = rng.randint(*BACKGROUND_GRAYS)
    color = tuple(rng.randint(215, 255) for _ in range(3))
    image = Image.new("RGB", SIZE, (gray, gray, gray))
    pen = ImageDraw.Draw(image)
    points = POINTS
    left, top, right, bottom = pen.textbbox((0, 0), word, font=_font(points))
    while right - left > SIZE[0] - 2:
        points -= 1
        left, top, right, bottom = pen.textbbox((0, 0), word, font=_font(points))
    x = rng.randint(1, min(3, SIZE[0] - 1 - int(right - left)))
    y = (SIZE[1] - int(bottom - top)) // 2 + rng.randint(-1, 1)
    pen.text((x - left, y - top), word, font=_font(points), fill=color)
    return image


@cache
def _font(points: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(points)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the process's exit status."""
    return run_maker(draw_examples, TASKS, "Render words for OCR.", argv)


if __name__ == "__main__":
    sys.exit(main())
