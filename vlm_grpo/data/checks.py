"""What is wrong with a dataset before a model sees it: bad rows, bad images, copies, answers."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from vlm_grpo.config.run import DataSettings
from vlm_grpo.coordinates import gold_boxes
from vlm_grpo.data.images import ImageReader
from vlm_grpo.data.loading import collect_examples, load_examples, open_source
from vlm_grpo.errors import bullets
from vlm_grpo.task import Task
from vlm_grpo.types import Example, ImageRef

logger = logging.getLogger(__name__)

_SIDE = 16
"""Width and height of the thumbnails that decide whether two images are copies."""
_MEAN_DIFFERENCE, _MAX_DIFFERENCE = 3.0, 32
"""Of the thumbnails' values (0 to 255): JPEG and a resize stay below, another object does not."""
_BANDS = 4
"""Images that differ in fewer than so many of their 128 hash bits share a band of them."""
_CROWDED = 5000
"""Images of one band that are compared one by one; more are only looked at for equal hashes."""
_SHOWN = 10


@dataclass(frozen=True)
class ImageHash:
    """A picture's fingerprint: a difference hash of 128 bits and a (16, 16, 3) thumbnail."""

    bands: tuple[bytes, ...]
    thumbnail: np.ndarray


@dataclass(frozen=True)
class DataReport:
    """What a check of one source found.

    Attributes:
        source: its name.
        examples: the good rows.
        bad_rows: what is wrong with each of the others.
        dead_images: images that do not decode, with the reason.
        boxes_outside: rows whose boxes leave their image, with the box.
        copies: groups of names of images that show the same picture.
        answers: the most frequent answers, or what the answers' numbers spread over.
        image_tokens: tokens of each example's images; empty without a pixel budget.
        prints: a fingerprint of every image that decodes, by name.
    """

    source: str
    examples: Sequence[Example]
    bad_rows: Sequence[str]
    dead_images: Sequence[str]
    boxes_outside: Sequence[str]
    copies: Sequence[Sequence[str]]
    answers: Sequence[str]
    image_tokens: Sequence[int] = ()
    prints: dict[str, ImageHash] = field(default_factory=dict, repr=False)

    @property
    def sound(self) -> bool:
        """Nothing is wrong; copies within one source may be meant (several questions on one)."""
        return not (self.bad_rows or self.dead_images or self.boxes_outside)


def check_source(
    source: str,
    task: Task,
    data: DataSettings | None = None,
    tokens: Callable[[tuple[int, int]], int] | None = None,
) -> DataReport:
    """Look at every row and decode every image of a source.

    Args:
        source: as for ``load_examples``.
        task: says which answers have the right form.
        data: image root and limits; its ``eval_limit`` bounds the rows.
        tokens: image tokens of an image of a given width and height.

    Raises:
        UserError: the source cannot be read at all.
    """
    data = DataSettings(train=source) if data is None else data
    examples, bad_rows = _rows(source, task, data)
    images = {_name(image): image for example in examples for image in example.images}
    prints: dict[str, ImageHash] = {}
    dead: list[str] = []
    for name, image in images.items():
        try:
            prints[name] = fingerprint(image.load())
        except ValueError as error:
            dead.append(str(error))
    names = list(prints)
    groups = same_pictures([prints[name] for name in names])
    return DataReport(
        source=source,
        examples=examples,
        bad_rows=bad_rows,
        dead_images=dead,
        boxes_outside=[line for example in examples for line in _outside(example)],
        copies=[[names[i] for i in group] for group in groups],
        answers=list(_answers(examples)),
        image_tokens=[sum(tokens(i.size) for i in e.images) for e in examples] if tokens else [],
        prints=prints,
    )


def overlaps(first: DataReport, second: DataReport) -> list[tuple[str, str]]:
    """Pairs of images, one of each source, that show the same picture."""
    names = [(0, name) for name in first.prints] + [(1, name) for name in second.prints]
    prints = [*first.prints.values(), *second.prints.values()]
    pairs = []
    for group in same_pictures(prints):
        members = [names[i] for i in group]
        left = [name for side, name in members if side == 0]
        right = [name for side, name in members if side == 1]
        if left and right:
            pairs += [(left[0], name) for name in right]
    return pairs


def warn_of_shared_images(train: Sequence[Example], held_out: Sequence[Example]) -> None:
    """Log how many held-out examples show an image of the training data, if any does.

    Images are compared as files and bytes, without decoding them; ``vlm-grpo data check --against``
    also finds copies that were re-encoded or resized.
    """
    trained = {_identity(image) for example in train for image in example.images}
    seen = [e.id for e in held_out if any(_identity(image) in trained for image in e.images)]
    if seen:
        logger.warning(
            "%d of %d held-out examples show an image that is also trained on, first %s: their "
            "score is not that of unseen images",
            len(seen),
            len(held_out),
            ", ".join(seen[:3]),
        )


def _identity(image: ImageRef) -> Path | bytes:
    if image.path is not None:
        return image.path
    return hashlib.blake2b(image.data or b"").digest()


def fingerprint(image: Image.Image) -> ImageHash:
    """The fingerprint of a decoded image; nearly the same after re-encoding or resizing it."""
    grey = image.convert("L")
    # Each bit says whether the brightness rises to the next cell, along the rows and the columns.
    across = np.asarray(grey.resize((9, 8), Image.Resampling.BOX), np.int16)
    down = np.asarray(grey.resize((8, 9), Image.Resampling.BOX), np.int16)
    bits = np.concatenate(
        [(np.diff(across, axis=1) > 0).ravel(), (np.diff(down, axis=0) > 0).ravel()]
    )
    bands = tuple(np.packbits(band).tobytes() for band in np.split(bits, _BANDS))
    thumbnail = image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    return ImageHash(bands, np.asarray(thumbnail))


def same_pictures(prints: Sequence[ImageHash]) -> list[list[int]]:
    """Groups of two or more places whose prints are of the same picture, in order.

    Prints that share a band of their hash are candidates; their thumbnails decide.
    """
    buckets: dict[tuple, list[int]] = defaultdict(list)
    for place, mark in enumerate(prints):
        for number, band in enumerate(mark.bands):
            buckets[number, band].append(place)
    edges: set[tuple[int, int]] = set()
    for places in buckets.values():
        edges |= _alike(places, prints)
    if not edges:
        return []
    rows, columns = zip(*edges, strict=True)
    graph = coo_array((np.ones(len(edges)), (rows, columns)), shape=(len(prints), len(prints)))
    labels = connected_components(graph, directed=False)[1]
    found: dict[int, list[int]] = defaultdict(list)
    for place in sorted({*rows, *columns}):
        found[labels[place]].append(place)
    return list(found.values())


def _alike(places: Sequence[int], prints: Sequence[ImageHash]) -> set[tuple[int, int]]:
    """Pairs of the places whose thumbnails agree."""
    if len(places) < 2:
        return set()
    if len(places) > _CROWDED:
        first: dict[bytes, int] = {}
        keys = [prints[place].thumbnail.tobytes() for place in places]
        return {
            (first[k], p) for k, p in zip(keys, places, strict=True) if first.setdefault(k, p) != p
        }
    thumbnails = np.stack([prints[place].thumbnail for place in places]).astype(np.int16)
    pairs: set[tuple[int, int]] = set()
    for i in range(len(places) - 1):
        difference = np.abs(thumbnails[i + 1 :] - thumbnails[i]).reshape(len(places) - i - 1, -1)
        near = (difference.mean(1) <= _MEAN_DIFFERENCE) & (difference.max(1) <= _MAX_DIFFERENCE)
        pairs |= {(places[i], places[i + 1 + j]) for j in np.flatnonzero(near).tolist()}
    return pairs


def care_lines(care: DataReport) -> Iterator[str]:
    """The check of one source, for people."""
    yield f"{care.source}: {len(care.examples)} good rows, {len(care.prints)} images that decode"
    for name, problems in (
        ("bad rows", care.bad_rows),
        ("images that do not decode", care.dead_images),
        ("boxes outside their image", care.boxes_outside),
    ):
        yield f"  {name:<28} {len(problems)}"
        if problems:
            yield bullets(problems, _SHOWN)
    pictures = sum(len(group) for group in care.copies)
    yield f"  {'images that are copies':<28} {pictures} in {len(care.copies)} groups"
    for group in care.copies[:_SHOWN]:
        yield f"  - {', '.join(group[:5])}{' …' if len(group) > 5 else ''}"
    for line in care.answers:
        yield f"  {line}"
    if care.image_tokens:
        low, middle, high = np.percentile(care.image_tokens, (0, 50, 100))
        yield f"  {'image tokens of an example':<28} {low:.0f} to {high:.0f}, median {middle:.0f}"


def overlap_lines(first: DataReport, second: DataReport) -> Iterator[str]:
    """What two sources share, for people; loud where they share anything."""
    pairs = overlaps(first, second)
    ids = {example.id for example in first.examples} & {example.id for example in second.examples}
    if not pairs and not ids:
        yield f"{first.source} and {second.source} share no picture and no id"
        return
    yield "!" * 78
    if pairs:
        yield f"{len(pairs)} PICTURES of {second.source} ARE ALSO IN {first.source}:"
        yield bullets([f"{there} is {here}" for here, there in pairs], _SHOWN)
    if ids:
        yield f"{len(ids)} IDS ARE IN BOTH: {', '.join(sorted(ids)[:_SHOWN])}"
    yield "A model trained on one and evaluated on the other has seen the test."
    yield "!" * 78


def _rows(source: str, task: Task, data: DataSettings) -> tuple[list[Example], list[str]]:
    if source.startswith("embedded:"):
        return load_examples(source, task, data), []
    rows, folder = open_source(source, "eval")
    images = ImageReader(data.image_root or folder, data.max_image_pixels)
    return collect_examples(rows, data, images, task, data.eval_limit)


def _name(image: ImageRef) -> str:
    return str(image.path) if image.path is not None else image.name


def _outside(example: Example) -> Iterator[str]:
    answer: Any = example.answer
    if not (isinstance(answer, dict) and "boxes" in answer and example.images):
        return
    width, height = example.images[0].size
    for x1, y1, x2, y2 in gold_boxes(answer):
        # A pixel of tolerance: annotations round.
        if x1 < -1 or y1 < -1 or x2 > width + 1 or y2 > height + 1:
            yield f"{example.id}: {[x1, y1, x2, y2]} in {width}x{height}"


def _answers(examples: Sequence[Example]) -> Iterator[str]:
    """How the answers are distributed, by their form."""
    n = max(1, len(examples))
    counts = [e.answer for e in examples if isinstance(e.answer, int)]
    if counts:
        found = Counter(counts)
        shares = [f"{count}: {times / n:.1%}" for count, times in sorted(found.items())]
        more = " …" if len(shares) > 20 else ""
        yield f"{'counts':<28} {', '.join(shares[:20])}{more}"
        yield f"{'always the most frequent':<28} {found.most_common(1)[0][1] / n:.1%} right"
    boxes = [gold_boxes(e.answer) for e in examples if isinstance(e.answer, dict)]
    if boxes:
        numbers = sorted(Counter(len(row) for row in boxes).items())
        yield f"{'boxes in a row':<28} " + ", ".join(f"{k}: {v}" for k, v in numbers[:20])
        areas = [((x2 - x1) * (y2 - y1)) ** 0.5 for row in boxes for x1, y1, x2, y2 in row]
        if areas:
            low, middle, high = np.percentile(areas, (5, 50, 95))
            spread = f"5 %: {low:.0f}, median {middle:.0f}, 95 %: {high:.0f}"
            yield f"{'sides of boxes in pixels':<28} {spread}"
    texts = [a if isinstance(a := e.answer, str) else a[0] for e in examples if _is_text(e.answer)]
    if texts:
        low, middle, high = np.percentile([len(text) for text in texts], (0, 50, 100))
        yield f"{'characters of an answer':<28} {low:.0f} to {high:.0f}, median {middle:.0f}"
        common = ", ".join(
            f"{text[:20]!r} {times}" for text, times in Counter(texts).most_common(5)
        )
        yield f"{'most frequent':<28} {common}"


def _is_text(answer: Any) -> bool:
    return isinstance(answer, str) or (isinstance(answer, list | tuple) and len(answer) > 0)
