"""Images of random words for OCR, in capitals of Pillow's default font; the answer is the word.

Worlds, whose difficulty is set by dials: "words" in several fonts, and "handwriting", digits that
people wrote (from scikit-learn, of the extra ``handwriting``).

Example ``i`` depends on (task, dials, seed, split, i) only, so any prefix can be drawn anywhere:
``python -m vlm_grpo.data_scripts.make_words --count 1000 --seed 0 --out DIR``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from vlm_grpo.data_scripts.synthetic import (
    BACKGROUND_GRAYS,
    Generator,
    World,
    hold_image,
    sample_line,
)
from vlm_grpo.errors import UserError
from vlm_grpo.types import Example

SIZE = (84, 28)  #: Width and height of a word's image in pixels: 3 × 1 image tokens of a Qwen-VL

QUESTION = "What does the text say?"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
LENGTHS = (3, 4)  #: Smallest and largest number of letters in a word

POINTS = 22  #: Font size; a word too wide for the image gets a smaller one

FONTS = (None, "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "STIXGeneralItalic", "cmtt10")
"""Names of Matplotlib's fonts; None: Pillow's own."""


class Line(World):
    """A line of text in a light color."""

    longest: int = Field(default=LENGTHS[1], ge=LENGTHS[0], le=6)
    """Largest number of letters or digits; the smallest is 3."""
    tilt: int = Field(default=0, ge=0, le=20)
    """Largest angle of the line in degrees; 0: none."""

    def sample_text(self, alphabet: str, is_new: bool, rng: random.Random) -> str:
        """Sample a text with one held-out pair of neighbors, or with none."""
        return "".join(sample_line(alphabet, LENGTHS[0], self.longest, is_new, rng))

    def paint(self, mask: Image.Image, color: Sequence[int], rng: random.Random) -> Image.Image:
        """Paint a text, given as a mask; a dial of 0 takes no random number."""
        shade, *light = color
        image = Image.new("RGB", SIZE, (shade, shade, shade))
        self.draw_clutter(image, shade, rng)
        if self.tilt:
            mask = mask.rotate(rng.uniform(-self.tilt, self.tilt), Image.Resampling.BICUBIC)
        image.paste(self.fade(light, shade), mask=mask)
        return self.add_noise(image, rng)


class Words(Line):
    """Words of random capitals in several fonts; the evaluation has other pairs of letters."""

    levels: ClassVar = {
        "easy": {"fonts": 2},
        "medium": {"fonts": 4, "tilt": 3, "clutter": 4, "noise": 12},
        "hard": {"fonts": 6, "tilt": 6, "clutter": 8, "noise": 24, "contrast": 0.7},
    }

    fonts: int = Field(default=1, ge=1, le=len(FONTS))
    """Number of fonts, of which each word has one."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        word = self.sample_text(LETTERS, is_new, rng)
        return _build_example(name, word, _render(word, self, rng))


class Handwriting(Line):
    """Rows of handwritten digits, each by a hand of its own; the evaluation has other images and
    other pairs of digits."""

    levels: ClassVar = {
        "easy": {"longest": 3},
        "medium": {"tilt": 3, "clutter": 4, "noise": 12},
        "hard": {"tilt": 6, "clutter": 8, "noise": 24, "contrast": 0.8},
    }

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        text = self.sample_text(DIGITS, is_new, rng)
        side = min(SIZE[1] - 4, SIZE[0] // len(text))
        color = _sample_color(rng)
        mask = Image.new("L", SIZE)
        for place, digit in enumerate(text):
            glyph = rng.choice(load_digits(is_new)[int(digit)]).resize((side, side))
            mask.paste(glyph, (place * side, rng.randint(0, SIZE[1] - side)))
        return _build_example(name, text, self.paint(mask, color, rng))


def _draw_word(name: str, rng: random.Random) -> Example:
    """Draw a word of random capitals."""
    word = "".join(rng.choices(LETTERS, k=rng.randint(*LENGTHS)))
    return _build_example(name, word, _render(word, Words(), rng))


def _build_example(name: str, text: str, image: Image.Image) -> Example:
    return Example(id=name, images=(hold_image(image, name),), question=QUESTION, answer=text)


@cache
def load_digits(is_new: bool) -> list[list[Image.Image]]:
    """Return handwritten digits of 8×8 pixels by value: the last fifth of the data, or the rest."""
    try:
        data = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise UserError(
            "embedded:handwriting needs scikit-learn: pip install 'vlm-grpo[handwriting]'"
        ) from error
    start = len(data.images) * 4 // 5
    part = slice(start, None) if is_new else slice(start)
    digits: list[list[Image.Image]] = [[] for _ in DIGITS]
    for pixels, value in zip(data.images[part], data.target[part], strict=True):
        digits[value].append(Image.fromarray((pixels * 255 / 16).astype("uint8")))
    return digits


def _render(word: str, world: Words, rng: random.Random) -> Image.Image:
    """Render a word in a light color on a gray background, near the left edge."""
    color = _sample_color(rng)
    mask = Image.new("L", SIZE)
    pen = ImageDraw.Draw(mask)
    name = rng.choice(FONTS[: world.fonts]) if world.fonts > 1 else FONTS[0]
    points = POINTS
    left, top, right, bottom = pen.textbbox((0, 0), word, font=_font(name, points))
    while right - left > SIZE[0] - 2:
        points -= 1
        left, top, right, bottom = pen.textbbox((0, 0), word, font=_font(name, points))
    x = rng.randint(1, min(3, SIZE[0] - 1 - int(right - left)))
    y = (SIZE[1] - int(bottom - top)) // 2 + rng.randint(-1, 1)
    pen.text((x - left, y - top), word, font=_font(name, points), fill=255)
    return world.paint(mask, color, rng)


def _sample_color(rng: random.Random) -> list[int]:
    """Sample the gray of a background, then the red, green and blue of a light color."""
    return [rng.randint(*BACKGROUND_GRAYS), *(rng.randint(215, 255) for _ in range(3))]


@cache
def _font(name: str | None, points: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if name is None:
        return ImageFont.load_default(points)
    matplotlib = import_module("matplotlib")  # loading it takes longer than drawing a hundred words
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf", f"{name}.ttf"), points)


draw_examples = Generator(
    "words", {"ocr": _draw_word}, {"words": Words, "handwriting": Handwriting}
)

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
