"""Self-supervised: puzzles made of anybody's images, whose answer is known without a label."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw

from vlm_grpo.media.images import encode_png
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.task.drawing import GOLD_COLOR, draw_boxes
from vlm_grpo.task.parsing import parse_integer
from vlm_grpo.task.sentences import NUMBER_WORDS, Candidate, choose, fold, unwrap
from vlm_grpo.types import Example, ImageRef, VideoRef

Answer = tuple[int, ...]  # an order of pieces, or one number
_TURNS = {90: Image.Transpose.ROTATE_270, 180: Image.Transpose.ROTATE_180}
_TURNS[270] = Image.Transpose.ROTATE_90  # Pillow's are counterclockwise
_KEYS = {"jigsaw": "order", "rotation": "degrees", "odd": "piece", "order": "order"}
_THUMBNAIL = 8  # Side of the pictures by which parts of images and images are compared
_SAME = 1.0
"""Mean difference of two images' thumbnails in gray levels up to which one repeats the other; a
copy that was compressed or resized again stays below."""
_CLOSE = 0.05  # Relative difference of two depths or sizes whose order is unclear
_ITEM = r"(?:(?:the )?(?:piece|image|crop|part|tile|number|no\.) ?#?)?"
_JOINT = rf"(?: ?(?:[,;、|<>→–-]|->|=>) ?| )(?:(?:and|then) )?{_ITEM}"
_ORDER = re.compile(rf"{_ITEM}[\[(]? ?(?<!-)\d{{1,3}}(?:{_JOINT}\d{{1,3}})+ ?[\])]?", re.IGNORECASE)
_WORDS = re.compile(rf"\b(?:{'|'.join(NUMBER_WORDS)})\b", re.IGNORECASE)
_OTHER_WAY = re.compile(
    r"(?i)\brevers|\bbackward|\blast to (?:the )?first|\bright to left|\b(?:de(?:sc|cr)e\w+ing)\b"
    r"|\b(?:from|starting with) (?:the )?(?:most|largest|biggest|widest|fa?urthest|farthest)\b"
)
_RULE = re.compile(r"(?:\| ?:?-{2,}:? ?)+\|?")  # below the head of a table
_ROW = re.compile(r"\brow (\d{1,2}) ?: ?", re.IGNORECASE)
# Words after a number that make it no answer: of degrees another unit, of tiles their number.
_NO_DEGREES = re.compile(
    r"(?i)counter|anti|left|\d\W?(?:rad|min|sec|h(?:ou)?rs?\b|times|turns|pixels|px|tiles|percent)"
    # The turn that undoes the image's.
    r"|\b(?:must|should|(?:needs?|ha(?:s|ve)) to) be (?:turned|rotated)\b[^.;]{0,30}\d"
    r"|\b(?:turn|rotate) (?:it|the image)\b[^.;]{0,30}\d"
)
_NO_TILE = re.compile(
    r"(?i)\b\d+ (?:of the )?(?:tile|piece|part|image)s\b"
    r"|\b\d+ (?:is|looks|appears) (?:upright|(?:the )?right (?:way|side) up|fine|normal)\b"
)
_AT = re.compile(r"\brow (\d{1,2})(?:,| and|, and)? column (\d{1,2})\b", re.IGNORECASE)
_DEGREES = re.compile(r"(?i) ?(?:\^ ?\{? ?\\circ ?\}?|\\degree\b|°|\bdegrees?\b|\bdeg\b)")
_UPRIGHT = re.compile(r"(?i)\b(?:not|n['’]t) (?:been )?(?:turned|rotated)\b(?! (?:by |about )?\d)")


@dataclass(frozen=True)
class View(ImageRef):
    """A part of an image, perhaps of shuffled tiles, turned or resized; made when it is loaded."""

    source: ImageRef | None = None
    box: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the source, in pixels
    grid: tuple[int, int] = (1, 1)  # rows and columns of tiles of equal size
    #: number of the tile at each place, row by row; empty: each is at its own
    tiles: tuple[int, ...] = ()
    upside_down: int | None = None  # number of the tile that is turned by 180 degrees
    degrees: int = 0  # by which it is turned clockwise

    @property
    def origin(self) -> ImageRef:
        return self if self.source is None else self.source

    def read_bytes(self) -> bytes:
        return encode_png(self.load(), compress_level=1)

    def load(self) -> Image.Image:
        whole = _decode(self.origin).crop(self.box)
        rows, columns = self.grid
        width, height = whole.width // columns, whole.height // rows
        shown = Image.new("RGB", (width * columns, height * rows))
        for place, tile in enumerate(self.tiles or range(rows * columns)):
            x, y = tile % columns * width, tile // columns * height
            part = whole.crop((x, y, x + width, y + height))
            if tile == self.upside_down:
                part = part.transpose(Image.Transpose.ROTATE_180)
            shown.paste(part, (place % columns * width, place // columns * height))
        if self.degrees:
            shown = shown.transpose(_TURNS[self.degrees])
        return shown if shown.size == self.size else shown.resize(self.size)


@lru_cache(4)
def _decode(image: ImageRef) -> Image.Image:
    """Decode an image once for all of its pieces."""
    return image.load()


class SelfSupervised(Task):
    """Solve a puzzle that is made of the row's image, whose question and answer are not used.

    The puzzle is a pure function of the image's bytes, the row's id and ``seed``. A row is bad if
    its image is too small, featureless, or has parts that look alike, so that nobody could tell the
    answer, and if it repeats an earlier image of its source. A row with an answer in a puzzle's
    form, ``{"order": [3, 1, 2]}``, ``{"degrees": 90}`` or ``{"piece": 5}``, is a finished puzzle.

    Attributes:
        puzzle: "jigsaw": in which order are the tiles of the image? (Visual Jigsaw,
            arXiv:2509.25190); "rotation": by how many degrees is it turned?; "odd": which tile is
            upside down?; "order": sort parts of the image, from the nearest or the smallest, by
            the ``depths`` or ``sizes`` of the ``boxes`` in the row's answer; without these, by how
            much of the image they show.
        rows, columns: of tiles, in jigsaw and odd.
        joined: show the tiles of a jigsaw as one image instead of one image each.
        crops: number of parts in order; of more boxes, some are chosen.
        partial: reward of a wrong order whose parts are all in their places, but for the share.
        min_side: least side of a tile or part in pixels.
        min_difference: mean difference in gray levels (0 to 255) from which parts are told apart;
            0: images are not compared, and only their headers are read.
        seed: another seed makes other puzzles of the same images.
    """

    primary_metric = "exact"
    instruction: str | None = "Answer with the numbers alone, separated by commas."
    puzzle: Literal["jigsaw", "rotation", "odd", "order"] = "jigsaw"
    rows: int = 3
    columns: int = 3
    joined: bool = False
    crops: int = 4
    partial: float = 0.2
    min_side: int = 28
    min_difference: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.puzzle not in _KEYS:
            raise ValueError(f"puzzle is {self.puzzle!r}; it must be one of {', '.join(_KEYS)}")
        if min(self.rows, self.columns) < 1 or not 2 <= self.rows * self.columns <= 100:
            raise ValueError(f"{self.rows} rows and {self.columns} columns: give 2 to 100 tiles")
        if not 2 <= self.crops <= 20:
            raise ValueError(f"crops is {self.crops}; it must be from 2 to 20")
        if not 0 <= self.partial < 1:
            raise ValueError(f"partial is {self.partial}; it must be from 0 to less than 1")

    def pose(self, example: Example) -> Example:
        """Return the puzzle that is made of an example's image."""
        answer = example.answer
        if isinstance(answer, Mapping) and _KEYS[self.puzzle] in answer:
            return example
        if len(example.images) != 1 or isinstance(example.images[0], VideoRef):
            raise ValueError(f"a puzzle is made of one image; the row has {len(example.images)}")
        image = example.images[0]
        digest = hashlib.sha256(image.read_bytes()).hexdigest()
        rng = random.Random(f"{self.seed}/{self.puzzle}/{digest}/{example.id}")
        make = {
            "jigsaw": self._make_jigsaw,
            "rotation": self._make_rotation,
            "odd": self._make_odd,
            "order": self._make_order,
        }[self.puzzle]
        images, question, answer = make(image, example, rng)
        return replace(example, images=tuple(images), question=question, answer=answer, history=())

    def _make_jigsaw(self, image: ImageRef, example: Example, rng: random.Random) -> Any:
        whole = self._frame(image)
        count = self.rows * self.columns
        if self.min_difference:
            self._tell_apart([_decode(image).crop(whole.box)], grid=whole.grid)
        tiles = rng.sample(range(count), count)
        order = [1 + tiles.index(place) for place in range(count)]
        form = f"{self.rows} rows and {self.columns} columns"
        if self.joined:
            images = [replace(whole, name=f"{whole.name} shuffled", tiles=tuple(tiles))]
            shown = f"The tiles of an image of {form} are shuffled; they are numbered row by row."
        else:
            images = [self._crop(image, self._find_tile(whole, tile)) for tile in tiles]
            shown = f"The images are the {count} tiles of one image of {form}, shuffled."
        question = f"{shown} Which tile belongs in each place, row by row?"
        return images, question, {"order": order}

    def _make_rotation(self, image: ImageRef, example: Example, rng: random.Random) -> Any:
        whole = self._crop(image, (0, 0, *image.size))
        turned = [replace(whole, degrees=d, size=self._turn(whole.size, d)) for d in (0, *_TURNS)]
        if self.min_difference:
            small = _decode(image).resize((64, 64))
            self._tell_apart([small, *(small.transpose(turn) for turn in _TURNS.values())])
        chosen = rng.choice(turned)
        question = "By how many degrees is the image turned clockwise: 0, 90, 180 or 270?"
        return [chosen], question, {"degrees": chosen.degrees}

    def _make_odd(self, image: ImageRef, example: Example, rng: random.Random) -> Any:
        whole = self._frame(image)
        tiles = list(range(self.rows * self.columns))
        if self.min_difference:
            plain = _decode(image).crop(whole.box)
            parts = [plain.crop(self._find_tile(whole, n, inside=True)) for n in tiles]
            tiles = [n for n in tiles if self._differ(parts[n], parts[n].rotate(180))]
            if not tiles:
                raise ValueError(f"image {image.name}: every tile looks alike upside down")
        odd = rng.choice(tiles)
        question = (
            f"The image has {self.rows} rows and {self.columns} columns of tiles, numbered row by "
            "row from 1. Which tile is upside down?"
        )
        name = f"{image.name} upside down {odd}"
        return [replace(whole, name=name, upside_down=odd)], question, {"piece": odd + 1}

    def _make_order(self, image: ImageRef, example: Example, rng: random.Random) -> Any:
        found = example.answer if isinstance(example.answer, Mapping) else {}
        kind = next((key for key in ("depths", "sizes") if key in found), None)
        if kind is None:
            boxes, values = self._nest(image, rng), list(range(self.crops))
            by, first = "how much of the image they show", "the least"
        else:
            boxes, values = gold_boxes(found), list(found[kind])
            if len(boxes) != len(values) or not all(map(_is_number, values)):
                raise ValueError(f"its {kind} {values!r:.80} must be a number for each box")
            if len(boxes) < 2:
                raise ValueError("it has one box, which has no order")
            chosen = rng.sample(range(len(boxes)), min(self.crops, len(boxes)))
            boxes, values = [boxes[n] for n in chosen], [values[n] for n in chosen]
            by, first = {"depths": ("distance", "the nearest"), "sizes": ("size", "the smallest")}[
                kind
            ]
        ranks = sorted(range(len(boxes)), key=values.__getitem__)
        for low, high in pairwise(ranks):
            near, far = values[low], values[high]
            if far - near <= _CLOSE * max(abs(far), abs(near)) * (kind is not None):
                raise ValueError(f"two of its {kind}, {near} and {far}, are nearly equal")
        shown = rng.sample(range(len(boxes)), len(boxes))
        side = max(self.min_side, min(image.size) // 2)
        crops = [self._crop(image, tuple(map(round, boxes[n]))) for n in shown]
        if kind is None:
            crops = [replace(crop, size=(side, side)) for crop in crops]
        if self.min_difference:
            self._tell_apart([crop.load().resize((64, 64)) for crop in crops])
        number = len(crops)
        what = f"The {'last ' if kind else ''}{number} images are parts of one image"
        what += ", which is the first." if kind else ", enlarged to one size."
        question = f"{what} Sort the {number} parts by {by}, from {first} on."
        order = [1 + shown.index(n) for n in ranks]
        images = [image, *crops] if kind else crops
        return images, question, {"order": order}

    def _nest(self, image: ImageRef, rng: random.Random) -> list[Box]:
        """Return squares within each other, each of half the area of the next."""
        sides = [min(image.size) * 2 ** (-step / 2) for step in range(self.crops - 1, -1, -1)]
        x, y = (rng.uniform(sides[-1] / 2, length - sides[-1] / 2) for length in image.size)
        return [(x - s / 2, y - s / 2, x + s / 2, y + s / 2) for s in sides]

    def _frame(self, image: ImageRef) -> View:
        """Return the middle of an image whose tiles have equal sizes."""
        width, height = image.size[0] // self.columns, image.size[1] // self.rows
        x = (image.size[0] - width * self.columns) // 2
        y = (image.size[1] - height * self.rows) // 2
        self._check_side(image, min(width, height))
        box = (x, y, x + width * self.columns, y + height * self.rows)
        return replace(self._crop(image, box), grid=(self.rows, self.columns))

    def _find_tile(self, whole: View, tile: int, inside: bool = False) -> tuple[int, int, int, int]:
        """Return the box of a tile in the image, or in the view."""
        width, height = whole.size[0] // self.columns, whole.size[1] // self.rows
        left, top, *_ = (0, 0) if inside else whole.box
        x, y = left + tile % self.columns * width, top + tile // self.columns * height
        return (x, y, x + width, y + height)

    def _crop(self, image: ImageRef, box: Sequence[int]) -> View:
        x1, y1, x2, y2 = box
        width, height = image.size
        if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height):
            raise ValueError(f"box {list(box)} is outside its image of {width}x{height}")
        self._check_side(image, min(x2 - x1, y2 - y1))
        size = (x2 - x1, y2 - y1)
        return View(f"{image.name} {x1},{y1}", size, size, source=image, box=(x1, y1, x2, y2))

    def _check_side(self, image: ImageRef, side: int) -> None:
        if side < self.min_side:
            raise ValueError(
                f"image {image.name} is too small: a part has a side of {side} pixels, less than "
                f"min_side={self.min_side}"
            )

    @staticmethod
    def _turn(size: tuple[int, int], degrees: int) -> tuple[int, int]:
        width, height = size
        return (height, width) if degrees % 180 else size

    def _differ(self, first: Image.Image, second: Image.Image) -> bool:
        return _measure(_shrink(first), _shrink(second)) >= self.min_difference

    def _tell_apart(self, pictures: Sequence[Image.Image], grid: tuple[int, int] = (1, 1)) -> None:
        """Raise ValueError if two pictures, or tiles of the only one, look alike."""
        if grid != (1, 1):
            rows, columns = grid
            small = pictures[0].resize(
                (columns * _THUMBNAIL, rows * _THUMBNAIL), Image.Resampling.BOX
            )
            tiles = np.asarray(small, float).reshape(rows, _THUMBNAIL, columns, -1)
            found = tiles.transpose(0, 2, 1, 3).reshape(rows * columns, -1)
        else:
            found = np.stack([_shrink(picture).ravel() for picture in pictures])
        for number, own in enumerate(found):
            for other in range(number):
                if _measure(own, found[other]) < self.min_difference:
                    raise ValueError(
                        f"its parts {other + 1} and {number + 1} look alike (a mean difference of "
                        f"less than min_difference={self.min_difference:g} gray levels)"
                    )

    def find_repeat(self, example: Example, seen: dict[Any, Any]) -> str | None:
        """Return the id of an earlier row whose image looks the same."""
        views = [image for image in example.images if isinstance(image, View)]
        if not views or not self.min_difference:  # finished puzzles may share images
            return None
        own = _shrink(_decode(views[0].origin)).ravel()
        level = round(own.mean())  # images whose means differ by more are not the same
        for near in (level - 1, level, level + 1):
            names, pictures = seen.get(near, ((), ()))
            if names:
                differences = np.abs(np.asarray(pictures) - own).mean(axis=1)
                if differences.min() <= _SAME:
                    return names[int(differences.argmin())]
        names, pictures = seen.setdefault(level, ([], []))
        names.append(example.id)
        pictures.append(own)
        return None

    def parse(self, text: str, example: Example) -> Answer | None:
        if len(text) > 2_000:
            return None
        text = " ".join(fold(unwrap(text)).split())
        if self.puzzle in ("jigsaw", "order"):
            return _parse_order(text, len(example.answer["order"]))
        if self.puzzle == "rotation":
            text = _DEGREES.sub("", text)
            if parse_integer(upright := _UPRIGHT.sub("upright", text)) == 0:
                text = upright
        if self.puzzle == "odd":
            text = self._name_tiles(text)
        if (_NO_DEGREES if self.puzzle == "rotation" else _NO_TILE).search(text):
            return None
        number = parse_integer(text)
        return None if number is None or number not in self._list_numbers() else (number,)

    def _name_tiles(self, text: str) -> str:
        """Return a text with a tile's number for its row and column, without "the other eight"."""

        def write(place: re.Match[str]) -> str:
            row, column = int(place[1]), int(place[2])
            inside = 1 <= row <= self.rows and 1 <= column <= self.columns
            return str((row - 1) * self.columns + column) if inside else place[0]

        others = self.rows * self.columns - 1
        words = [word for word, number in NUMBER_WORDS.items() if number == others]
        either = "|".join([str(others), *words])
        return re.sub(rf"(?i)\bthe other (?:{either})\b", "the others", _AT.sub(write, text))

    def _list_numbers(self) -> Sequence[int]:
        if self.puzzle == "rotation":
            return (0, 90, 180, 270)
        return range(1, self.rows * self.columns + 1)

    def write(self, answer: Answer, example: Example) -> str:
        return ", ".join(map(str, answer))

    def gold_answer(self, example: Example) -> Answer:
        value = example.answer[_KEYS[self.puzzle]]
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    def check(self, example: Example) -> None:
        key = _KEYS[self.puzzle]
        if not example.images:
            raise ValueError("there is no image to make a puzzle of")
        if not isinstance(example.answer, Mapping) or key not in example.answer:
            raise ValueError(f"the answer {example.answer!r:.80} has no {key} of the {self.puzzle}")
        value = example.answer[key]
        if key == "order":
            is_list = isinstance(value, list | tuple) and all(type(n) is int for n in value)
            if not is_list or len(value) < 2 or sorted(value) != list(range(1, len(value) + 1)):
                raise ValueError(f"order {value!r:.80} must be the numbers from 1 on, in an order")
        elif type(value) is not int or value not in self._list_numbers():
            known = ", ".join(map(str, self._list_numbers()))
            raise ValueError(f"{key} {value!r:.80} must be one of {known}")

    def draw(self, image: Image.Image, answer: Answer, example: Example, color: str) -> Image.Image:
        """Write the answer in the place that it is about: gold at the top, other answers below."""
        if self.puzzle == "odd":
            rows, columns = self.rows, self.columns
            x, y = (answer[0] - 1) % columns, (answer[0] - 1) // columns
            width, height = image.width / columns, image.height / rows
            box = (x * width, y * height, (x + 1) * width, (y + 1) * height)
            return draw_boxes(image, [box], color)
        drawn = image.copy()
        pen, below = ImageDraw.Draw(drawn), color != GOLD_COLOR
        size = max(10, min(image.size) // 10)
        if not (self.puzzle == "jigsaw" and self.joined):
            text = f"{answer[0]}°" if self.puzzle == "rotation" else self.write(answer, example)
            pen.text((2, image.height - 1.5 * size if below else 2), text, color, font_size=size)
            return drawn
        width, height = image.width / self.columns, image.height / self.rows
        for place, tile in enumerate(answer):  # the place of each tile that is shown
            x, y = (tile - 1) % self.columns * width, (tile - 1) // self.columns * height
            top = y + height - 1.5 * size if below else y + 2
            pen.text((x + 2, top), str(place + 1), color, font_size=size)
        return drawn

    @reward(weight=1.0)
    def solved(self, answer: Answer, example: Example) -> float:
        """1 for the right answer; for another order, ``partial`` times the share of right places.

        Visual Jigsaw's code (visual_jigsaw.py) pays a part for more than four tiles only.
        """
        gold = self.gold_answer(example)
        if answer == gold:
            return 1.0
        return self.partial * _share(answer, gold) if len(gold) > 1 else 0.0

    @metric()
    def exact(self, answer: Answer, example: Example) -> float:
        """1 for the right answer, else 0."""
        return float(answer == self.gold_answer(example))

    @metric()
    def places(self, answer: Answer, example: Example) -> float:
        """Share of the right places of an order; of one number, 1 or 0."""
        return _share(answer, self.gold_answer(example))


def _share(answer: Answer, gold: Answer) -> float:
    return sum(a == g for a, g in zip(answer, gold, strict=True)) / len(gold)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)


def _shrink(picture: Image.Image) -> np.ndarray:
    small = picture.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small, float)


def _measure(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).mean())


def _parse_order(text: str, count: int) -> Answer | None:
    """Return the order of the numbers from 1 to ``count`` that a text states.

    >>> _parse_order("The order is 3, 1, 2.", 3), _parse_order("1, 2, 3 or 3, 1, 2", 3)
    ((3, 1, 2), None)
    """
    if not re.search(r"\d", text):
        text = _WORDS.sub(lambda word: str(NUMBER_WORDS[word[0].lower()]), text)
    text = re.sub(r"\] ?,? ?\[", ", ", text)  # rows of a grid
    text = re.sub(r"\|(?: ?\|)+", "|", _RULE.sub("|", text))
    if [int(row) for row in _ROW.findall(text)] == [*range(1, 1 + len(_ROW.findall(text)))]:
        text = _ROW.sub("", text)
    if _OTHER_WAY.search(text):
        return None
    text = re.sub(rf"\b{count} (?=pieces|images|parts|tiles|crops|numbers)", "", text)
    found = [
        Candidate(*run.span(), tuple(map(int, re.findall(r"\d+", run[0]))))
        for run in _ORDER.finditer(text)
    ]
    if not found or re.search(r"\d", _ORDER.sub("", text)):
        return None
    if any(sorted(run.value) != list(range(1, count + 1)) for run in found):
        return None
    return choose(text, found)
