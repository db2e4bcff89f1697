"""Draw analog clocks and write them as a dataset: ``python make_clocks.py clocks``.

Writes ``clocks/train.jsonl``, ``clocks/test.jsonl`` and ``clocks/images/``. The answer of a row
is the hour, 1 to 12. The dials are small and gray, and the question has a fixed form, because the
embedded model was trained from scratch on such images and questions, for tests.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

SIDE = 84
QUESTION = "How many hours are there?"


def _pick_gray(rng: random.Random) -> tuple[int, int, int]:
    """Return a random tinted gray, so that no two clocks are identical."""
    red, green, blue = (rng.randint(100, 140) for _ in range(3))
    return red, green, blue


def draw_clock(hour: int, rng: random.Random) -> Image.Image:
    """Return a clock with a short red hour hand, and a long white minute hand at twelve."""
    image = Image.new("RGB", (SIDE, SIDE), _pick_gray(rng))
    pen = ImageDraw.Draw(image)
    radius = rng.uniform(0.36, 0.46) * SIDE
    middle = SIDE / 2 + rng.uniform(-4, 4), SIDE / 2 + rng.uniform(-4, 4)

    def at(turn: float, length: float) -> tuple[float, float]:
        angle = 2 * math.pi * turn
        x, y = middle
        return x + length * radius * math.sin(angle), y - length * radius * math.cos(angle)

    pen.circle(middle, radius, fill=_pick_gray(rng), outline="black", width=2)
    for mark in range(12):
        pen.line([at(mark / 12, 0.85), at(mark / 12, 0.97)], fill="black", width=2)
    pen.line([middle, at(0, 0.8)], fill="white", width=2)
    pen.line([middle, at(hour / 12, 0.6)], fill="red", width=6)
    return image


def write_split(folder: Path, split: str, count: int, rng: random.Random) -> None:
    """Write ``count`` clocks with random hours, and their rows in ``split.jsonl``."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            hour = rng.randint(1, 12)
            name = f"images/{split}-{number:05d}.png"
            draw_clock(hour, rng).save(folder / name)
            row = {
                "id": f"{split}-{number}",
                "images": [name],
                "question": QUESTION,
                "answer": hour,
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw analog clocks and write them as a dataset.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=2000, help="training clocks")
    parser.add_argument("--test", type=int, default=200, help="held-out clocks")
    arguments = parser.parse_args()
    rng = random.Random(0)  # fixed, so that the clocks are reproducible
    write_split(arguments.folder, "train", arguments.train, rng)
    write_split(arguments.folder, "test", arguments.test, rng)


if __name__ == "__main__":
    main()
