"""Functions shared by the generators of synthetic data: seeding, encoding, files, command line."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from PIL import Image, ImageChops, ImageDraw
from pydantic import Field

from vlm_grpo.config.section import Frozen
from vlm_grpo.errors import UserError
from vlm_grpo.media.images import encode_png
from vlm_grpo.types import Example, ImageRef, VideoRef
from vlm_grpo.utils.atomic_io import create_whole_folder

BACKGROUND_GRAYS = (108, 132)
"""Darkest and lightest gray of a background.

Image processors subtract a mean near (123, 117, 104), so such a background is nearly zero after
normalization and the vision tower's input is the drawing alone. Trained from scratch on white
backgrounds, the embedded model ignored the words for 2,000 steps; on gray it reads after 200.
"""


class World(Frozen):
    """A kind of images whose difficulty is set by dials, the fields, and whose evaluation asks
    about compositions that training does not contain (systematic generalization).
    """

    levels: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Named values of the dials."""

    noise: int = Field(default=0, ge=0, le=120)
    """Largest change of a pixel by noise, in gray levels; 0: none."""
    clutter: int = Field(default=0, ge=0, le=40)
    """Number of gray strokes behind the objects; 0: none."""
    contrast: float = Field(default=1.0, ge=0.1, le=1)
    """Share of the difference between an object's color and the background; 1: all."""
    held_out: bool = True
    """Whether evaluation asks about the held-out compositions; false: about those of training, in
    other images."""

    @classmethod
    def read(cls, name: str, text: str) -> Self:
        """Return the world with dials such as ``hard,occlusion=0.3``: a level (by default medium),
        and changes of it; raises UserError if one is wrong."""
        words = text.split(",") if text else []
        level = words.pop(0) if words and words[0] in cls.levels else "medium"
        dials = dict(word.partition("=")[::2] for word in words)
        try:
            return cls(**{**cls.levels[level], **dials})
        except UserError as error:
            known = f"Levels: {', '.join(cls.levels)}; dials: {', '.join(cls.model_fields)}"
            raise UserError(f"embedded:{name}:{text}: {error}\n{known}") from error

    def draw(self, name: str, rng: random.Random, is_new: bool) -> Example:
        """Draw the example with an id; ``is_new``: about a held-out composition."""
        raise NotImplementedError

    def fade(self, color: Sequence[int], gray: int) -> tuple[int, ...]:
        """Return a color at this contrast to a gray background."""
        return tuple(round(gray + self.contrast * (value - gray)) for value in color)

    def draw_background(self, size: tuple[int, int], rng: random.Random) -> tuple[Image.Image, int]:
        gray = rng.randint(*BACKGROUND_GRAYS)
        image = Image.new("RGB", size, (gray,) * 3)
        self.draw_clutter(image, gray, rng)
        return image, gray

    def draw_clutter(self, image: Image.Image, gray: int, rng: random.Random) -> None:
        """Draw the strokes, a little darker or lighter than the background."""
        pen = ImageDraw.Draw(image)
        for _ in range(self.clutter):
            x, y = rng.randrange(image.width), rng.randrange(image.height)
            end = (x + rng.randint(-20, 20), y + rng.randint(-20, 20))
            pen.line((x, y, *end), fill=(gray + rng.choice((-40, -25, 25, 40)),) * 3)

    def add_noise(self, image: Image.Image, rng: random.Random) -> Image.Image:
        """Return the image with uniform gray noise, which is the same on every machine."""
        if not self.noise:
            return image
        noise = Image.frombytes("L", image.size, rng.randbytes(image.width * image.height))
        change = noise.point([round(2 * self.noise * value / 255) for value in range(256)])
        # The offset takes the noise's mean away before the result is clipped at 0 and 255.
        return ImageChops.add(image, change.convert("RGB"), offset=-self.noise)


@dataclass(frozen=True)
class Generator:
    """A generator of examples, and its command line.

    Example ``i`` depends on (task, dials, seed, split, i) only.
    """

    name: str  # name of what is drawn; ids begin with it
    # by task, returns the example with an id, drawn by a random generator
    draw: Mapping[str, Callable[[str, random.Random], Example]]
    # by task, the kinds with dials (``relations:hard,occlusion=0.3``). The first task of both is
    # the default of the command line
    worlds: Mapping[str, type[World]] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All tasks."""
        return (*self.draw, *self.worlds)

    def __call__(self, task: str, count: int, seed: int = 0, split: str = "train") -> list[Example]:
        """Draw examples of one of ``kinds``, where a world may be followed by its dials.

        The same seed gives the same examples on every machine. Two splits of one seed are
        independent draws; a world's "eval" asks about held-out compositions, any other about the
        rest. ``ValueError``: the task is unknown or the count is below 1.
        """
        kind, colon, text = task.partition(":")
        if kind not in self.kinds:
            raise ValueError(
                f"there are no {self.name} for task {task!r}: choose {', '.join(self.kinds)}"
            )
        if colon and kind in self.draw:
            worlds = ", ".join(self.worlds)
            raise UserError(f"embedded:{kind} has no dials, as in {task}; those of {worlds} have")
        if count < 1:
            raise ValueError(f"count is {count}; it must be at least 1")
        draw = self.draw.get(kind)
        if draw is None:
            world = self.worlds[kind].read(kind, text)
            draw = partial(world.draw, is_new=world.held_out and split == "eval")
        label = re.sub(r"[^\w.]+", "-", task)
        return [
            draw(f"{self.name}-{label}-{split}-{i}", make_rng(self.name, kind, seed, split, i))
            for i in range(count)
        ]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command line and return the process's exit status."""
        parser = argparse.ArgumentParser(description=f"Draw examples: {self.name}.")
        first = self.kinds[0]
        parser.add_argument("--task", default=first, help=f"what to draw: {', '.join(self.kinds)}")
        parser.add_argument("--count", type=int, required=True, help="number of examples")
        parser.add_argument("--seed", type=int, default=0, help="random seed")
        parser.add_argument(
            "--split", default="train", help="splits of one seed are independent draws"
        )
        parser.add_argument("--out", type=Path, required=True, help="folder to create")
        arguments = parser.parse_args(argv)
        try:
            examples = self(arguments.task, arguments.count, arguments.seed, arguments.split)
            kind = arguments.task.partition(":")[0]
            path = write_examples(examples, arguments.out, f"{kind}.jsonl")
        except (UserError, OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"wrote {len(examples)} examples to {path}")
        return 0


def make_rng(*key: object) -> random.Random:
    """Return a random generator that depends on ``key`` only.

    ``random`` hashes a text seed with SHA-512, so the stream is the same in every process and on
    every machine, independent of ``PYTHONHASHSEED``.
    """
    return random.Random("/".join(map(str, key)))


def is_held_out(first: int, second: int) -> bool:
    """Return whether a pair of attributes, by their numbers, is held out: every fourth pair, so
    that each attribute also occurs in other pairs."""
    return (first + second) % 4 == 0


def sample_line(
    signs: Sequence[str], shortest: int, longest: int, is_new: bool, rng: random.Random
) -> list[str]:
    """Sample signs in a line, one pair of whose neighbors is held out if ``is_new``, else none."""
    numbers = [rng.randrange(len(signs))]
    length = rng.randint(shortest, longest)
    place = rng.randrange(1, length) if is_new else None
    for end in range(1, length):
        fits = [is_held_out(numbers[-1], n) == (end == place) for n in range(len(signs))]
        numbers.append(rng.choice([n for n, fit in enumerate(fits) if fit]))
    return [signs[number] for number in numbers]


def hold_image(image: Image.Image, name: str) -> ImageRef:
    """Hold an image as PNG bytes in memory; ``resized_size`` is the image's own size."""
    data = encode_png(image, compress_level=1)  # drawing takes a quarter less time than with 6
    return ImageRef(name=name, size=image.size, resized_size=image.size, data=data)


def write_examples(examples: Iterable[Example], out: Path, file_name: str) -> Path:
    """Write examples as canonical JSONL with their images, all or nothing; return its path.

    ``out`` becomes the rows' ``image_root``; it must be empty or missing.
    """
    with create_whole_folder(out) as temporary:
        (temporary / "images").mkdir()
        with (temporary / file_name).open("w", encoding="utf-8") as file:
            for example in examples:
                file.write(json.dumps(_write_images(example, temporary), ensure_ascii=False) + "\n")
    return out / file_name


def _write_images(example: Example, root: Path) -> dict[str, object]:
    """Write the images of an example below ``root`` and return its row."""
    media: dict[str, list[object]] = {"images": []}
    for image in example.images:
        frames = image.frames if isinstance(image, VideoRef) else (image,)
        paths = [f"images/{frame.name}.png" for frame in frames]
        for frame, path in zip(frames, paths, strict=True):
            (root / path).write_bytes(frame.read_bytes())
        if isinstance(image, VideoRef):
            media.setdefault("videos", []).append({"frames": paths, "times": image.times})
        else:
            media["images"] += paths
    return {
        "id": example.id,
        **media,
        "question": example.question,
        "answer": example.answer,
        "meta": dict(example.meta),
    }
