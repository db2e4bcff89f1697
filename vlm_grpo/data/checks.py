"""Checks of a dataset: bad rows, unreadable images, duplicate images, answer statistics."""

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

_THUMBNAIL_SIZE = (16, 16)
"""Size in pixels of the thumbnails that decide whether two images are duplicates."""
_MEAN_DIFFERENCE, _MAX_DIFFERENCE = 3.0, 32
"""Largest differences between thumbnails of duplicates, of 255: JPEG compression and resizing stay
below them; a different object exceeds them."""
_BANDS = 4
"""Images that differ in fewer than this many of their 128 hash bits agree in at least one band."""
_MAX_PAIRWISE = 5000
"""Largest bucket that is compared pairwise; in larger ones only equal thumbnails are found."""
_MAX_LISTED = 10
"""Problems listed under each heading of a report."""


@dataclass(frozen=True)
class ImageHash:
    """A perceptual hash of an image.

    Attributes:
        bands: four parts of a difference hash of 128 bits.
        thumbnail: (16, 16, 3) RGB values, uint8.
    """

    bands: tuple[bytes, ...]
    thumbnail: np.ndarray


@dataclass(frozen=True)
class DataReport:
    """The findings of a check of one source.

    Attributes:
        source: the source's name.
        examples: the good rows.
        bad_rows: location and problem of each bad row.
        unreadable_images: images that cannot be decoded, each with the reason.
        boxes_outside: boxes that extend beyond their image, each with its row's id.
        duplicates: groups of names of images that show the same picture.
        answers: lines of statistics on the gold answers.
        image_tokens: number of image tokens of each example; empty without a token counter.
        hashes: the hash of every image that can be decoded, by the image's name.
    """

    source: str
    examples: Sequence[Example]
    bad_rows: Sequence[str]
    unreadable_images: Sequence[str]
    boxes_outside: Sequence[str]
    duplicates: Sequence[Sequence[str]]
    answers: Sequence[str]
    image_tokens: Sequence[int] = ()
    hashes: dict[str, ImageHash] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> bool:
        """Return whether nothing is wrong; duplicates within a source are allowed."""
        return not (self.bad_rows or self.unreadable_images or self.boxes_outside)


def check_source(
    source: str,
    task: Task,
    data: DataSettings | None = None,
    count_tokens: Callable[[tuple[int, int]], int] | None = None,
) -> DataReport:
    """Check every row and decode every image of a source.

    Args:
        source: as for ``load_examples``.
        task: the task that checks the form of each answer.
        data: image root and limits; at most ``eval_limit`` examples are read.
        count_tokens: returns the number of image tokens for an image's width and height in pixels.

    Raises:
        UserError: the source cannot be read at all.
    """
    data = DataSettings(train=source) if data is None else data
    examples, bad_rows = _read_examples(source, task, data)
    images = {_get_name(image): image for example in examples for image in example.images}
    hashes: dict[str, ImageHash] = {}
    unreadable: list[str] = []
    for name, image in images.items():
        try:
            hashes[name] = hash_image(image.load())
        except ValueError as error:
            unreadable.append(str(error))
    names = list(hashes)
    groups = find_duplicates(list(hashes.values()))
    return DataReport(
        source=source,
        examples=examples,
        bad_rows=bad_rows,
        unreadable_images=unreadable,
        boxes_outside=[line for example in examples for line in _find_boxes_outside(example)],
        duplicates=[[names[i] for i in group] for group in groups],
        answers=list(_describe_answers(examples)),
        image_tokens=[]
        if count_tokens is None
        else [sum(count_tokens(image.size) for image in e.images) for e in examples],
        hashes=hashes,
    )


def find_shared_images(first: DataReport, second: DataReport) -> list[tuple[str, str]]:
    """Return pairs of image names, one of each source, that show the same picture.

    Every such image of the second source appears once, with one match in the first.
    """
    names = [*first.hashes, *second.hashes]
    pairs = []
    for group in find_duplicates([*first.hashes.values(), *second.hashes.values()]):
        in_first = [names[i] for i in group if i < len(first.hashes)]
        in_second = [names[i] for i in group if i >= len(first.hashes)]
        if in_first:
            pairs += [(in_first[0], name) for name in in_second]
    return pairs


def warn_about_shared_images(train: Sequence[Example], held_out: Sequence[Example]) -> None:
    """Log how many held-out examples show an image of the training data, if any.

    Images are compared by path and encoded bytes, without decoding them; ``vlm-grpo data check
    --against`` also finds re-encoded and resized duplicates.
    """
    trained = {_get_identity(image) for example in train for image in example.images}
    shared = [e.id for e in held_out if any(_get_identity(image) in trained for image in e.images)]
    if shared:
        logger.warning(
            "%d of %d held-out examples show an image that is also trained on (first: %s): their "
            "score does not measure unseen images",
            len(shared),
            len(held_out),
            ", ".join(shared[:3]),
        )


def _get_identity(image: ImageRef) -> Path | bytes:
    if image.path is not None:
        return image.path
    return hashlib.blake2b(image.data or b"").digest()


def hash_image(image: Image.Image) -> ImageHash:
    """Return the hash of a decoded image; re-encoding or resizing the image hardly changes it."""
    gray = image.convert("L")
    # A bit is set where the brightness rises from a cell to the next one in its row or column.
    across = np.asarray(gray.resize((9, 8), Image.Resampling.BOX), np.int16)
    down = np.asarray(gray.resize((8, 9), Image.Resampling.BOX), np.int16)
    bits = np.concatenate(
        [(np.diff(across, axis=1) > 0).ravel(), (np.diff(down, axis=0) > 0).ravel()]
    )
    bands = tuple(np.packbits(band).tobytes() for band in np.split(bits, _BANDS))
    thumbnail = image.convert("RGB").resize(_THUMBNAIL_SIZE, Image.Resampling.BOX)
    return ImageHash(bands, np.asarray(thumbnail))


def find_duplicates(hashes: Sequence[ImageHash]) -> list[list[int]]:
    """Return groups of two or more indices whose hashes are of the same picture, in order.

    Hashes with a band in common are candidates; their thumbnails decide.
    """
    buckets: dict[tuple, list[int]] = defaultdict(list)
    for index, image_hash in enumerate(hashes):
        for number, band in enumerate(image_hash.bands):
            buckets[number, band].append(index)
    edges: set[tuple[int, int]] = set()
    for indices in buckets.values():
        edges |= _find_similar_pairs(indices, hashes)
    if not edges:
        return []
    rows, columns = zip(*edges, strict=True)
    graph = coo_array((np.ones(len(edges)), (rows, columns)), shape=(len(hashes), len(hashes)))
    labels = connected_components(graph, directed=False)[1]
    groups: dict[int, list[int]] = defaultdict(list)
    for index in sorted({*rows, *columns}):
        groups[labels[index]].append(index)
    return list(groups.values())


def _find_similar_pairs(
    indices: Sequence[int], hashes: Sequence[ImageHash]
) -> set[tuple[int, int]]:
    """Return the pairs of ``indices`` whose thumbnails are similar."""
    if len(indices) < 2:
        return set()
    if len(indices) > _MAX_PAIRWISE:
        first: dict[bytes, int] = {}
        keys = [hashes[index].thumbnail.tobytes() for index in indices]
        return {
            (first[k], i) for k, i in zip(keys, indices, strict=True) if first.setdefault(k, i) != i
        }
    thumbnails = np.stack([hashes[index].thumbnail for index in indices]).astype(np.int16)
    pairs: set[tuple[int, int]] = set()
    for i in range(len(indices) - 1):
        difference = np.abs(thumbnails[i + 1 :] - thumbnails[i]).reshape(len(indices) - i - 1, -1)
        near = (difference.mean(1) <= _MEAN_DIFFERENCE) & (difference.max(1) <= _MAX_DIFFERENCE)
        pairs |= {(indices[i], indices[i + 1 + j]) for j in np.flatnonzero(near).tolist()}
    return pairs


def format_report(report: DataReport) -> Iterator[str]:
    """Yield the lines that the command line prints for one source."""
    good_rows, readable = len(report.examples), len(report.hashes)
    yield f"{report.source}: {good_rows} good rows, {readable} readable images"
    for name, problems in (
        ("bad rows", report.bad_rows),
        ("unreadable images", report.unreadable_images),
        ("boxes outside their image", report.boxes_outside),
    ):
        yield f"  {name:<28} {len(problems)}"
        if problems:
            yield bullets(problems, _MAX_LISTED)
    images = sum(len(group) for group in report.duplicates)
    yield f"  {'duplicate images':<28} {images} in {len(report.duplicates)} groups"
    for group in report.duplicates[:_MAX_LISTED]:
        yield f"  - {', '.join(group[:5])}{' …' if len(group) > 5 else ''}"
    for line in report.answers:
        yield f"  {line}"
    if report.image_tokens:
        low, median, high = np.percentile(report.image_tokens, (0, 50, 100))
        yield f"  {'image tokens per example':<28} {low:.0f} to {high:.0f}, median {median:.0f}"


def format_overlap(first: DataReport, second: DataReport) -> Iterator[str]:
    """Yield the lines that the command line prints about images and ids in both sources."""
    pairs = find_shared_images(first, second)
    ids = {example.id for example in first.examples} & {example.id for example in second.examples}
    if not pairs and not ids:
        yield f"{first.source} and {second.source} have no image and no id in common"
        return
    yield "!" * 78
    if pairs:
        yield f"{len(pairs)} IMAGES of {second.source} ARE ALSO IN {first.source}:"
        yield bullets([f"{in_second} is {in_first}" for in_first, in_second in pairs], _MAX_LISTED)
    if ids:
        yield f"{len(ids)} IDS ARE IN BOTH: {', '.join(sorted(ids)[:_MAX_LISTED])}"
    yield "A model trained on one and evaluated on the other has seen test data."
    yield "!" * 78


def _read_examples(source: str, task: Task, data: DataSettings) -> tuple[list[Example], list[str]]:
    """Return the good rows and the problems of the bad ones."""
    if source.startswith("embedded:"):
        return load_examples(source, task, data), []
    rows, folder = open_source(source, "eval")
    images = ImageReader(data.image_root or folder, data.max_image_pixels)
    return collect_examples(rows, data, images, task, data.eval_limit)


def _get_name(image: ImageRef) -> str:
    return str(image.path) if image.path is not None else image.name


def _find_boxes_outside(example: Example) -> Iterator[str]:
    """Yield a line for each gold box that extends beyond the example's first image."""
    answer: Any = example.answer
    if not (isinstance(answer, dict) and "boxes" in answer and example.images):
        return
    width, height = example.images[0].size
    for x1, y1, x2, y2 in gold_boxes(answer):
        # Tolerate one pixel: annotations are rounded.
        if x1 < -1 or y1 < -1 or x2 > width + 1 or y2 > height + 1:
            yield f"{example.id}: {[x1, y1, x2, y2]} in {width}x{height}"


def _describe_answers(examples: Sequence[Example]) -> Iterator[str]:
    """Yield lines of statistics on the counts, boxes and texts among the gold answers."""
    total = max(1, len(examples))
    counts = Counter(e.answer for e in examples if isinstance(e.answer, int))
    if counts:
        shares = [f"{count}: {times / total:.1%}" for count, times in sorted(counts.items())]
        more = " …" if len(shares) > 20 else ""
        yield f"{'counts':<28} {', '.join(shares[:20])}{more}"
        yield f"{'always the most frequent':<28} {counts.most_common(1)[0][1] / total:.1%} right"
    boxes = [gold_boxes(e.answer) for e in examples if isinstance(e.answer, dict)]
    if boxes:
        numbers = sorted(Counter(len(row) for row in boxes).items())
        yield f"{'boxes per row':<28} " + ", ".join(f"{k}: {v}" for k, v in numbers[:20])
        sides = [((x2 - x1) * (y2 - y1)) ** 0.5 for row in boxes for x1, y1, x2, y2 in row]
        if sides:
            low, median, high = np.percentile(sides, (5, 50, 95))
            spread = f"5 %: {low:.0f}, median {median:.0f}, 95 %: {high:.0f}"
            yield f"{'box side in pixels':<28} {spread}"
    texts = [a if isinstance(a := e.answer, str) else a[0] for e in examples if _is_text(e.answer)]
    if texts:
        low, median, high = np.percentile([len(text) for text in texts], (0, 50, 100))
        yield f"{'characters per answer':<28} {low:.0f} to {high:.0f}, median {median:.0f}"
        common = ", ".join(
            f"{text[:20]!r} {times}" for text, times in Counter(texts).most_common(5)
        )
        yield f"{'most frequent':<28} {common}"


def _is_text(answer: Any) -> bool:
    return isinstance(answer, str) or (isinstance(answer, list | tuple) and len(answer) > 0)
