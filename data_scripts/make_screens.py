"""Drawn screens for the task gui: windows with buttons that show a colored icon.

World: "screens" (click the red circle), whose difficulty is set by dials. Example ``i`` depends on
(dials, seed, split, i) only: ``python -m vlm_grpo.data_scripts.make_screens --count 10 --out DIR``.
"""

from __future__ import annotations

import random
from itertools import product
from typing import ClassVar

from PIL import Image, ImageDraw
from pydantic import Field

from vlm_grpo.data_scripts.make_shapes import COLORS, SIDE, draw_mask, list_similar, sample_pair
from vlm_grpo.data_scripts.synthetic import Generator, World, hold_image
from vlm_grpo.types import Example

TITLE = 9  #: Height of a window's title bar in pixels
BORDER = 3  #: Least distance between a button's edge and its icon, its cell's edge or the window's

Box = tuple[int, int, int, int]


class Screens(World):
    """Click the button with an icon; each other icon shares its color or its kind. The evaluation
    asks about pairs that no screen of training contains."""

    levels: ClassVar = {
        "easy": {"columns": 2, "rows": 2, "distractors": 1},
        "medium": {"columns": 2, "rows": 2, "distractors": 3, "clutter": 4},
        "hard": {"columns": 3, "rows": 2, "distractors": 5, "clutter": 8, "noise": 20},
    }

    columns: int = Field(default=2, ge=1, le=4)
    rows: int = Field(default=2, ge=1, le=3)
    """Columns and rows of cells in the window; a cell has one button at most."""
    distractors: int = Field(default=3, ge=0, le=11)
    """Largest number of other buttons; the smallest is half of it."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        target, pairs = sample_pair(is_new, rng)
        similar = list_similar(target, pairs)
        rng.shuffle(similar)
        count = rng.randint((self.distractors + 1) // 2, self.distractors)
        cells = self._list_cells()
        icons = [target, *similar][: min(1 + count, len(cells))]
        screen, gray = self.draw_background((SIDE, SIDE), rng)
        _draw_window(screen, gray)
        boxes = []
        for (kind, color), cell in zip(icons, rng.sample(cells, len(icons)), strict=True):
            boxes.append(_sample_button(cell, rng))
            _draw_button(screen, boxes[-1], kind, self.fade(COLORS[color], gray), gray)
        screen = self.add_noise(screen, rng)
        elements = [
            {"kind": kind, "color": color, "box": list(box)}
            for (kind, color), box in zip(icons, boxes, strict=True)
        ]
        return Example(
            id=name,
            images=(hold_image(screen, name),),
            question=f"click the {target[1]} {target[0]}",
            answer={"boxes": [list(boxes[0])]},
            meta={"elements": elements},
        )

    def _list_cells(self) -> list[Box]:
        """Return the cells of the window below its title bar."""
        width, height = (SIDE - 2) // self.columns, (SIDE - 3 - TITLE) // self.rows
        corners = product(range(self.columns), range(self.rows))
        starts = ((1 + x * width, TITLE + 2 + y * height) for x, y in corners)
        return [(x, y, x + width, y + height) for x, y in starts]


def _draw_window(screen: Image.Image, gray: int) -> None:
    """Draw a window around the screen, with a title bar that has three dots."""
    pen = ImageDraw.Draw(screen)
    pen.rectangle((0, 0, SIDE - 1, SIDE - 1), outline=(gray - 40,) * 3)
    pen.rectangle((0, 0, SIDE - 1, TITLE), fill=(gray - 40,) * 3)
    for x in (4, 9, 14):
        pen.ellipse((x - 1, 3, x + 1, 5), fill=(gray + 20,) * 3)


def _sample_button(cell: Box, rng: random.Random) -> Box:
    """Sample a button in a cell: at least two thirds of its sides, without the borders."""
    (x1, x2), (y1, y2) = (
        (start, start + side)
        for low, high in ((cell[0], cell[2]), (cell[1], cell[3]))
        for room in (high - low - BORDER,)
        for side in (rng.randint(2 * room // 3, room),)
        for start in (low + 1 + rng.randint(0, room - side),)
    )
    return x1, y1, x2, y2


def _draw_button(
    screen: Image.Image, box: Box, kind: str, color: tuple[int, ...], gray: int
) -> None:
    """Draw a light button with an icon in its middle."""
    x1, y1, x2, y2 = box
    pen = ImageDraw.Draw(screen)
    pen.rectangle((x1, y1, x2 - 1, y2 - 1), fill=(gray + 35,) * 3, outline=(gray - 30,) * 3)
    side = min(x2 - x1, y2 - y1) - 2 * BORDER
    left, top = (x1 + x2 - side) // 2, (y1 + y2 - side) // 2
    screen.paste(color, mask=draw_mask(kind, (left, top, left + side, top + side)))


draw_examples = Generator("screens", {}, {"screens": Screens})

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
