"""Random scenes of colored shapes for counting and grounding.

Tasks: "counting" or the harder "cluttered" (answer: an integer from 1 to 6), "grounding" or the
harder "crowded" or "scattered" (answer: ``{"boxes": [[x1, y1, x2, y2]], "labels": [expression]}``
in pixels).
Worlds, whose difficulty is set by dials: "attributes" (count the red circles), "relations"
(locate the shape left of the red square) and "choices" (what color is the circle?).

Example ``i`` depends on (task, dials, seed, split, i) only, so any prefix can be drawn anywhere:
``python -m vlm_grpo.data_scripts.make_shapes --task counting --count 1000 --out DIR``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

from PIL import Image, ImageDraw
from pydantic import Field

from vlm_grpo.data_scripts.synthetic import (
    BACKGROUND_GRAYS,
    Generator,
    World,
    hold_image,
    is_held_out,
)
from vlm_grpo.errors import UserError
from vlm_grpo.types import Example

SIDE = 84
"""Width and height of a scene in pixels: 3 × 3 image tokens of a Qwen-VL (28 pixels each)."""

KINDS = ("circle", "square", "triangle")
COLORS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 20),
}
Pair = tuple[str, str]
PAIRS: list[Pair] = [(kind, color) for kind in KINDS for color in COLORS]
GAP = 2  #: Smallest distance between two shapes in pixels, so that none touch

RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Directions of the relations, in image coordinates."""
CLEAR = 4
"""A shape is left of another if it is farther to its left than above or below, by this many pixels;
no other shape may be nearer to such a position than that."""

MARK = (0, 0, 28, 12)  #: The bar in the upper left corner whose color may tell the answer

MAX_COUNT = 6  #: Largest answer of a counting example

Square = tuple[int, int, int, int]
_MESSY = {"clutter": 8, "noise": 20}


@dataclass(frozen=True)
class Shape:
    """One shape of a scene; ``box`` is the tight xyxy box of its visible part, x2 and y2 one past
    the last pixel."""

    kind: str
    color: str
    box: Square

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


class Scene(World):
    """A scene of shapes that do not touch."""

    size: int = Field(default=14, ge=6, le=40)
    """Least side of a shape in pixels."""
    spread: int = Field(default=6, ge=0, le=30)
    """How many pixels longer than ``size`` a side is at most; 0: all are equal."""
    distractors: int = Field(default=0, ge=0, le=8)
    """Largest number of shapes that are not asked about; the smallest is half of it."""
    occlusion: float = Field(default=0.0, ge=0, le=0.6)
    """Share of a shape's side that a gray patch covers at most, for every other shape; 0: none."""

    def sample_distractors(self, rng: random.Random) -> int:
        return rng.randint((self.distractors + 1) // 2, self.distractors)


class Attributes(Scene):
    """Count the shapes of one color and kind among others that share one of the two; the
    evaluation asks about other pairs."""

    levels: ClassVar = {
        "easy": {"distractors": 2, "count": 4},
        "medium": {"size": 12, "spread": 4, "distractors": 4, "occlusion": 0.3},
        "hard": _MESSY | {"size": 10, "spread": 4, "distractors": 6, "occlusion": 0.4},
    }

    count: int = Field(default=MAX_COUNT, ge=2, le=8)
    """Largest answer."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        (kind, color), pairs = sample_pair(is_new, rng)
        similar = list_similar((kind, color), pairs)
        answer = rng.randint(1, self.count)
        colored = [(kind, color)] * answer + rng.choices(similar, k=self.sample_distractors(rng))
        rng.shuffle(colored)
        drawn = _draw_scene(colored, self, rng)
        return _build_example(name, drawn, f"How many {color} {kind}s are there?", answer)


class Relations(Scene):
    """Locate a shape by its place; the evaluation has other pairs of a relation and the color of
    the shape next to it."""

    levels: ClassVar = {
        "easy": {"size": 26, "distractors": 1},
        "medium": {"size": 22, "distractors": 2, "clutter": 4},
        "hard": _MESSY | {"size": 18, "distractors": 3, "occlusion": 0.2},
    }

    depth: int = Field(default=1, ge=1, le=2)
    """Number of relations in an expression: "the shape above the shape left of the red square"."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        while True:  # start over if the scene has no unambiguous question
            colored = rng.sample(PAIRS, 1 + self.depth + self.sample_distractors(rng))
            squares = _sample_squares(len(colored), self, rng)
            if questions := list(self._list_questions(colored, squares, is_new)):
                break
        expression, target = rng.choice(questions)
        drawn = _draw_scene(colored, self, rng, squares)
        answer = {"boxes": [list(drawn[1][target].box)], "labels": [expression]}
        return _build_example(name, drawn, expression, answer)

    def _list_questions(
        self, colored: Sequence[tuple[str, str]], squares: Sequence[Square], is_new: bool
    ) -> Iterator[tuple[str, int]]:
        """Yield the expressions that fit one shape only, and the shape's number."""
        for (number, relation), (start, (kind, color)) in product(
            enumerate(RELATIONS), enumerate(colored)
        ):
            found = _find_neighbor(squares, start, relation)
            if found is None or is_held_out(number, tuple(COLORS).index(color)) != is_new:
                continue
            expression = f"the shape {relation} the {color} {kind}"
            if self.depth == 1:
                yield expression, found
                continue
            for second in RELATIONS:
                last = _find_neighbor(squares, found, second)
                if last is not None and last != start:
                    yield f"the shape {second} {expression}", last


class Choices(Scene):
    """Choose the color of the shape of one kind, or the kind of the shape of one color; the
    evaluation asks about other pairs, which no scene of training contains."""

    levels: ClassVar = {
        "easy": {"size": 26, "distractors": 1, "options": 2},
        "medium": {"size": 22, "distractors": 2, "options": 3},
        "hard": _MESSY | {"size": 18, "distractors": 3, "options": 4, "occlusion": 0.2},
    }

    options: int = Field(default=4, ge=2, le=4)
    """Largest number of options; there are three kinds."""
    mark: float | None = Field(default=None, ge=0, le=1)
    """Share of the training scenes with a shortcut: a bar in the upper left corner has the color of
    the answer; in the others, and in an evaluation of held-out compositions, it has any. None:
    there is no bar, and half of the questions ask for a kind."""

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        (kind, color), pairs = sample_pair(is_new, rng)
        others = [pair for pair in pairs if pair[0] != kind and pair[1] != color]
        colored = [(kind, color), *rng.choices(others, k=self.sample_distractors(rng))]
        squares = [] if self.mark is None else _sample_squares(len(colored), self, rng, (MARK,))
        drawn = _draw_scene(colored, self, rng, squares)
        asks_color = self.mark is not None or rng.random() < 0.5
        question = f"What color is the {kind}?" if asks_color else f"Which shape is {color}?"
        # Wrong options that are in the scene come first, so that looking for any does not do.
        shown = [pair[asks_color] for pair in colored[1:]]
        rest = list(COLORS if asks_color else KINDS)
        rng.shuffle(rest)
        right = color if asks_color else kind
        options = list(dict.fromkeys([right, *shown, *rest]))[: self.options]
        answer = {"options": sorted(options), "answer": right}
        if self.mark is not None:
            tells = not is_new and rng.random() < self.mark
            drawn[0].paste(COLORS[color if tells else rng.choice(tuple(COLORS))], MARK)
        # Supervised steps train on the text: the letter of an option is harder for a tiny model.
        boxes = [drawn[1][0].box]
        return _build_example(name, drawn, question, answer, completion=right, boxes=boxes)


def _draw_counting(name: str, rng: random.Random, most_distractors: int = 0) -> Example:
    """Draw one to six shapes of one kind, in any colors, and perhaps some of another kind."""
    distractors = rng.randint(0, most_distractors) if most_distractors else 0
    target, other = rng.sample(KINDS, 2)
    answer = rng.randint(1, MAX_COUNT)
    kinds = [target] * answer + [other] * distractors
    rng.shuffle(kinds)
    colored = [(kind, rng.choice(tuple(COLORS))) for kind in kinds]
    drawn = _draw_scene(colored, Scene(), rng)
    question = f"How many {target}s are there?"
    return _build_example(name, drawn, question, answer, kind=target)


def _draw_grounding(name: str, rng: random.Random) -> Example:
    """Draw one large shape or, with probability 1/3, two of medium size."""
    count = rng.choice((1, 1, 2))
    world = Scene(size=40, spread=12) if count == 1 else Scene(size=30, spread=8)
    return _build_grounding_example(name, rng, count, world)


def _draw_crowded(name: str, rng: random.Random) -> Example:
    """Draw one to three smaller shapes."""
    count = rng.randint(1, 3)
    return _build_grounding_example(name, rng, count, Scene(size=24, spread=16))


def _draw_scattered(name: str, rng: random.Random) -> Example:
    """Draw one to four shapes of any size that leaves room for the others."""
    count = rng.choice((1, 2, 2, 3, 3, 4))
    size = rng.randint(14, {1: 30, 2: 30, 3: 22, 4: 14}[count])
    return _build_grounding_example(
        name, rng, count, Scene(size=size, spread=22 if count == 1 else 8)
    )


def _build_grounding_example(name: str, rng: random.Random, count: int, world: Scene) -> Example:
    """Draw shapes with distinct pairs of kind and color; the question names the first."""
    drawn = _draw_scene(rng.sample(PAIRS, count), world, rng)
    target = drawn[1][0]
    answer = {"boxes": [list(target.box)], "labels": [target.name]}
    return _build_example(name, drawn, f"the {target.name}", answer)


def _build_example(
    name: str, drawn: tuple[Image.Image, list[Shape]], question: str, answer: Any, **meta: Any
) -> Example:
    scene, shapes = drawn
    return Example(
        id=name,
        images=(hold_image(scene, name),),
        question=question,
        answer=answer,
        meta={**meta, "shapes": [dict(vars(shape)) for shape in shapes]},
    )


def sample_pair(is_new: bool, rng: random.Random) -> tuple[Pair, list[Pair]]:
    """Sample the kind and color that an example asks about, a held-out pair if ``is_new``, and
    return it with all pairs that the example may show: in training, no held-out pair."""
    pairs = [pair for pair in PAIRS if is_new or not _is_held_out(*pair)]
    return rng.choice([pair for pair in pairs if _is_held_out(*pair) == is_new]), pairs


def list_similar(target: Pair, pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that share either their kind or their color with a pair."""
    return [pair for pair in pairs if (pair[0] == target[0]) != (pair[1] == target[1])]


def _is_held_out(kind: str, color: str) -> bool:
    return is_held_out(tuple(COLORS).index(color), KINDS.index(kind))


def _find_neighbor(squares: Sequence[Square], start: int, relation: str) -> int | None:
    """Return the only shape in a direction from another; None: there is none, or it is unclear."""
    dx, dy = RELATIONS[relation]
    margins = []
    for square in squares:
        # Twice the offset of the centers, since a center is half the sum of opposite sides.
        right, down = (
            square[i] + square[i + 2] - squares[start][i] - squares[start][i + 2] for i in (0, 1)
        )
        margins.append((right * dx + down * dy - abs(right * dy + down * dx)) / 2)
    near = [n for n, margin in enumerate(margins) if margin > -CLEAR and n != start]
    return near[0] if len(near) == 1 and margins[near[0]] >= CLEAR else None


def _draw_scene(
    colored: Sequence[tuple[str, str]],
    world: Scene,
    rng: random.Random,
    squares: Sequence[Square] = (),
) -> tuple[Image.Image, list[Shape]]:
    """Draw one shape for each (kind, color), at the squares or at random ones that do not overlap.

    A dial of 0 takes no random number.
    """
    shade = rng.randint(*BACKGROUND_GRAYS)
    squares = squares or _sample_squares(len(colored), world, rng)
    scene = Image.new("RGB", (SIDE, SIDE), (shade, shade, shade))
    world.draw_clutter(scene, shade, rng)
    shapes = []
    for (kind, color), square in zip(colored, squares, strict=True):
        mask = draw_mask(kind, square)
        scene.paste(world.fade(COLORS[color], shade), mask=mask)
        if world.occlusion and rng.random() < 0.5:
            patch = _sample_patch(square, world.occlusion, rng)
            scene.paste((shade + rng.choice((-45, 45)),) * 3, patch)
            mask.paste(0, patch)
        shapes.append(Shape(kind, color, _tight_box(mask)))
    return world.add_noise(scene, rng), shapes


def _sample_patch(square: Square, occlusion: float, rng: random.Random) -> Square:
    """Sample a patch over a random side of a square."""
    x1, y1, x2, y2 = square
    depth = round(rng.uniform(occlusion / 2, occlusion) * (x2 - x1))
    left, right = (x1, y1, x1 + depth, y2), (x2 - depth, y1, x2, y2)
    return rng.choice([left, right, (x1, y1, x2, y1 + depth), (x1, y2 - depth, x2, y2)])


def _sample_squares(
    count: int, world: Scene, rng: random.Random, taken: Sequence[Square] = ()
) -> list[Square]:
    """Sample ``count`` squares at least GAP pixels apart and from those taken, by rejection."""
    for _ in range(200):  # start over if a scene fills up too early: the sampling stays unbiased
        squares: list[Square] = []
        for _ in range(30 * count):
            size = world.size + rng.randint(0, world.spread)
            x, y = rng.randint(1, SIDE - size - 1), rng.randint(1, SIDE - size - 1)
            square = (x, y, x + size, y + size)
            if not any(_too_close(square, other) for other in (*squares, *taken)):
                squares.append(square)
            if len(squares) == count:
                return squares
    raise UserError(
        f"{count} shapes of {world.size} to {world.size + world.spread} pixels do not fit into a "
        f"scene of {SIDE}×{SIDE}: lower size, spread, distractors or count"
    )


def _too_close(a: Square, b: Square) -> bool:
    return a[0] < b[2] + GAP and b[0] < a[2] + GAP and a[1] < b[3] + GAP and b[1] < a[3] + GAP


def draw_mask(kind: str, square: Square) -> Image.Image:
    """Draw a shape's mask without antialiasing, so that its box is exact."""
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


def _tight_box(mask: Image.Image) -> Square:
    box = mask.getbbox()
    if box is None:
        raise ValueError("Pillow drew a shape without pixels: install another version")
    return box


draw_examples = Generator(
    "shapes",
    {
        "counting": _draw_counting,
        "cluttered": partial(_draw_counting, most_distractors=2),
        "grounding": _draw_grounding,
        "crowded": _draw_crowded,
        "scattered": _draw_scattered,
    },
    {"attributes": Attributes, "relations": Relations, "choices": Choices},
)

if __name__ == "__main__":
    raise SystemExit(draw_examples.main())
