"""Scenes of coloured shapes for counting and grounding, drawn from a seed.

Example ``i`` depends on (task, seed, split, i) and nothing else, so any slice can be drawn
anywhere: ``python -m vlm_grpo.data_scripts.make_shapes --task counting --count 1000 --out DIR``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from PIL import Image, ImageDraw

from vlm_grpo.data_scripts.synthetic import BACKGROUND_GRAYS, encode_png, make_rng, run_maker
from vlm_grpo.types import Example

TASKS = ("counting", "cluttered", "grounding", "crowded")
SIDE = 84
"""Width and height of a scene in pixels: 3 × 3 image tokens of a Qwen-VL (28 pixels each)."""

KINDS = ("circle", "square", "triangle")
COLORS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 20),
}
GAP = 2
"""Fewest background pixels between two shapes, so that none touch."""

MAX_COUNT = 6
"""Largest answer of a counting example."""


@dataclass(frozen=True)
class Shape:
    """One shape of a scene; ``box`` is its tight xyxy box, x2 and y2 one past the last pixel."""

    kind: str
    color: str
    box: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


def draw_examples(task: str, count: int, seed: int = 0, split: str = "train") -> list[Example]:
    """Draw ``count`` scenes in memory.

    Args:
        task: "counting" or the harder "cluttered" (answer: an integer from 1 to 6), "grounding"
            or the harder "crowded" (answer:
            ``{"boxes": [[x1, y1, x2, y2]], "labels": [expression]}`` in pixels).
        count: how many, at least 1.
        seed: the same seed gives the same scenes on every machine.
        split: name of a part of the data; two splits of one seed are independent draws.

    Raises:
        ValueError: the task is unknown or the count is below 1.
    """
    if task not in TASKS:
        raise ValueError(f"there are no shapes for task {task!r}; choose {', '.join(TASKS)}")
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    make = {
        "counting": _counting,
        "cluttered": _cluttered,
        "grounding": _grounding,
        "crowded": _crowded,
    }[task]
    return [
        make(f"shapes-{task}-{split}-{i}", make_rng("shapes", task, seed, split, i))
        for i in range(count)
    ]


def _counting(name: str, rng: random.Random) -> Example:
    """One to six shapes of one kind, in any colours."""
    return _count(name, rng, distractors=0)


def _cluttered(name: str, rng: random.Random) -> Example:
    """The same among up to two shapes of another kind."""
    return _count(name, rng, distractors=rng.randint(0, 2))


def _count(name: str, rng: random.Random, distractors: int) -> Example:
    asked, other = rng.sample(KINDS, 2)
    answer = rng.randint(1, MAX_COUNT)
    kinds = [asked] * answer + [other] * distractors
    rng.shuffle(kinds)
    wanted = [(kind, rng.choice(tuple(COLORS))) for kind in kinds]
    scene, shapes = _draw(wanted, sizes=(14, 20), rng=rng)
    return Example(
        id=name,
        images=(encode_png(scene, name),),
        question=f"How many {asked}s are there?",
        answer=answer,
        meta={"kind": asked, "shapes": [asdict(shape) for shape in shapes]},
    )


def _grounding(name: str, rng: random.Random) -> Example:
    """A large shape, or (one time in three) two of middle size."""
    count = rng.choice((1, 1, 2))
    return _locate(name, rng, count, sizes=(40, 52) if count == 1 else (30, 38))


def _crowded(name: str, rng: random.Random) -> Example:
    """One to three smaller shapes."""
    return _locate(name, rng, rng.randint(1, 3), sizes=(24, 40))


def _locate(name: str, rng: random.Random, count: int, sizes: tuple[int, int]) -> Example:
    """No two shapes are alike in both colour and kind; the first one is asked for."""
    pairs = [(kind, color) for kind in KINDS for color in COLORS]
    scene, shapes = _draw(rng.sample(pairs, count), sizes, rng)
    asked = shapes[0]
    return Example(
        id=name,
        images=(encode_png(scene, name),),
        question=f"the {asked.name}",
        answer={"boxes": [list(asked.box)], "labels": [asked.name]},
        meta={"shapes": [asdict(shape) for shape in shapes]},
    )


def _draw(
    wanted: Sequence[tuple[str, str]], sizes: tuple[int, int], rng: random.Random
) -> tuple[Image.Image, list[Shape]]:
    """A scene with one shape for each wanted (kind, colour), at random free places.

    Args:
        wanted: kinds and colours, in the order of the shapes returned.
        sizes: smallest and largest side of a shape, in pixels.
        rng: where every choice comes from.
    """
    shade = rng.randint(*BACKGROUND_GRAYS)
    scene = Image.new("RGB", (SIDE, SIDE), (shade, shade, shade))
    shapes = []
    for (kind, color), square in zip(wanted, _places(len(wanted), sizes, rng), strict=True):
        mask = _mask(kind, square)
        scene.paste(COLORS[color], mask=mask)
        shapes.append(Shape(kind, color, _tight_box(mask)))
    return scene, shapes


def _places(
    count: int, sizes: tuple[int, int], rng: random.Random
) -> list[tuple[int, int, int, int]]:
    """``count`` squares in the scene, at least GAP pixels apart, by rejection."""
    while True:  # a scene that fills up too early is thrown away whole, to stay unbiased
        found: list[tuple[int, int, int, int]] = []
        for _ in range(30 * count):
            size = rng.randint(*sizes)
            x, y = rng.randint(1, SIDE - size - 1), rng.randint(1, SIDE - size - 1)
            square = (x, y, x + size, y + size)
            if not any(_near(square, other) for other in found):
                found.append(square)
            if len(found) == count:
                return found


def _near(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    return a[0] < b[2] + GAP and b[0] < a[2] + GAP and a[1] < b[3] + GAP and b[1] < a[3] + GAP


def _mask(kind: str, square: tuple[int, int, int, int]) -> Image.Image:
    """The shape's pixels, without soft edges: a pixel belongs to the shape or it does not."""
    x1, y1, x2, y2 = square[0], square[1], square[2] - 1, square[3] - 1  # Pillow includes ends
    mask = Image.new("1", (SIDE, SIDE), 0)
    pen = ImageDraw.Draw(mask)
    if kind == "circle":
        pen.ellipse((x1, y1, x2, y2), fill=1)
    elif kind == "square":
        pen.rectangle((x1, y1, x2, y2), fill=1)
    else:
        pen.polygon([((x1 + x2) / 2, y1), (x1, y2), (x2, y2)], fill=1)
    return mask


def _tight_box(mask: Image.Image) -> tuple[int, int, int, int]:
    box = mask.getbbox()
    if box is None:
        raise ValueError("a shape was drawn without a pixel; this Pillow cannot be used")
    return box


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the process's exit status."""
    return run_maker(draw_examples, TASKS, "Draw scenes of shapes for counting or grounding.", argv)


if __name__ == "__main__":
    sys.exit(main())
