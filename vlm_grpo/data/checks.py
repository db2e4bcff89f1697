"""Checks of a dataset: bad rows, unreadable images, duplicate images, answer statistics."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from scipy.cluster.hierarchy import DisjointSet

from vlm_grpo.config.data import DataSettings, SourceSettings, Split
from vlm_grpo.data.loading import read_source
from vlm_grpo.errors import bullets
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import gold_boxes
from vlm_grpo.types import Example, ImageRef

_MAX_LISTED = 10  # Problems listed under each heading of a report
_THUMBNAIL_SIZE = (16, 16)
"""Size in pixels of the thumbnails that decide whether two images are duplicates."""
_MEAN_DIFFERENCE, _MAX_DIFFERENCE = 3.0, 32
"""Largest differences between thumbnails of duplicates, of 255: JPEG compression and resizing stay
below them; a different object exceeds them."""
_BANDS = 4
"""Images that differ in fewer than this many of their 128 hash bits agree in at least one band."""
_MAX_PAIRWISE = 5000
"""Largest bucket that is compared pairwise; in larger ones only equal thumbnails are found."""
_SIDE = 64  # Side in pixels of the squares to which the images of a suspected pair are resized
_MAX_CHANGED = 0.03
"""Largest share of these pixels that differs, by more than ``_MAX_DIFFERENCE``, in duplicates: JPEG
compression of a photograph changes none of them, that of an image of 84 pixels up to 2 %."""

Measure = Callable[[Sequence[Example], Task], tuple[list[int] | None, list[str]]]
"""Returns the numbers of tokens of examples' prompts (None: unknown), and the problems of those
that cannot be built."""


@dataclass(frozen=True)
class ImageHash:
    bands: tuple[bytes, ...]  # four parts of a difference hash of 128 bits
    thumbnail: np.ndarray  # (16, 16, 3) RGB values, uint8
    load: Callable[[], Image.Image]  # returns the image


@dataclass(frozen=True)
class DataReport:
    """The findings of a check of one source."""

    source: str  # the source's name
    examples: Sequence[Example]  # the good rows
    # the problems of each kind, by its name; a kind without any was checked
    problems: dict[str, list[str]]
    skips_bad_rows: bool  # bad rows are no failure, as training skips them
    duplicates: Sequence[Sequence[str]]  # groups of names of images that show the same picture
    statistics: Sequence[str]  # lines on the gold answers and the prompts
    # the hash of every image that can be decoded, by the image's name
    hashes: dict[str, ImageHash] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether there are examples and no problems; duplicates within a source are allowed."""
        skipped = {"bad rows"} if self.skips_bad_rows else set()
        found = {name for name, problems in self.problems.items() if problems}
        return bool(self.examples) and found <= skipped

    def describe(self) -> Iterator[str]:
        """Yield the lines that the command line prints."""
        good_rows, readable = len(self.examples), len(self.hashes)
        yield f"{self.source}: {good_rows} good rows, {readable} readable images"
        for name, problems in self.problems.items():
            yield f"  {name:<28} {len(problems)}"
            if problems:
                yield bullets(problems, _MAX_LISTED)
        images = sum(map(len, self.duplicates))
        yield f"  {'duplicate images':<28} {images} in {len(self.duplicates)} groups"
        for group in self.duplicates[:_MAX_LISTED]:
            yield f"  - {', '.join(group[:5])}{' …' if len(group) > 5 else ''}"
        yield from (f"  {line}" for line in self.statistics)


def check_source(
    source: str, task: Task, data: DataSettings, measure: Measure, split: Split = "eval"
) -> DataReport:
    """Check every row, decode every image and measure every prompt of a source.

    ``measure`` builds the prompts of the rows whose images are readable; the other arguments are
    those of ``load_examples``.
    """
    own = data.complete(SourceSettings(source=source), split)
    examples, bad_rows = read_source(own, task, data, split)
    hashes: dict[str, ImageHash] = {}
    unreadable: dict[str, str] = {}
    images = {_get_name(i): (i, e) for e in examples for i in e.images}
    for name, (image, example) in images.items():
        try:
            hashes[name] = hash_image(image.load(), image.load)
        except ValueError as error:
            unreadable[name] = f"{example.name}: {error}"
    readable = [e for e in examples if not any(_get_name(i) in unreadable for i in e.images)]
    lengths, bad_prompts = measure(readable, task)
    names = list(hashes)
    problems = {
        "bad rows": bad_rows,
        "unreadable images": list(unreadable.values()),
        "boxes outside their image": [b for e in examples for b in _find_boxes_outside(e, task)],
        "prompts that cannot be built": bad_prompts,
    }
    unchecked = "not checked without --model: control tokens in the text, the chat template, the "
    prompts = unchecked + "lengths of the prompts"
    if lengths is not None:
        prompts = _describe_spread("tokens per prompt", lengths)
    return DataReport(
        source=source,
        examples=examples,
        problems=problems,
        skips_bad_rows=data.on_bad_row == "skip",
        duplicates=[[names[i] for i in group] for group in find_duplicates(list(hashes.values()))],
        statistics=[*_describe_answers(examples), prompts],
        hashes=hashes,
    )


def describe_overlap(first: DataReport, second: DataReport) -> list[str]:
    """Return lines on the images and ids that two sources have in common.

    Every image of the second source that shows a picture of the first is named once. Ids that
    only number the rows of a source do not count.
    """
    hashes = [*first.hashes.items(), *second.hashes.items()]
    images = []
    for group in find_duplicates([image for _, image in hashes]):
        if group[0] < len(first.hashes):
            name, image = hashes[group[0]]
            for copy, other in (hashes[i] for i in group if i >= len(first.hashes)):
                changed = measure_difference(image, other)
                images.append(f"{copy} is {name} ({changed:.1%} of the pixels differ)")
    shared = {e.id for e in first.examples} & {e.id for e in second.examples}
    ids = sorted(name for name in shared if not re.fullmatch(r"row-\d+", name))
    if not images and not ids:
        return []
    lines = ["!" * 78]
    if images:
        lines.append(f"{len(images)} IMAGES of {second.source} ARE ALSO IN {first.source}:")
        lines.append(bullets(images, _MAX_LISTED))
    if ids:
        lines.append(f"{len(ids)} IDS ARE IN BOTH: {', '.join(ids[:_MAX_LISTED])}")
    return [
        *lines, "A model trained on one and evaluated on the other has seen test data.", "!" * 78
    ]  # fmt: skip


def _describe_spread(name: str, numbers: Sequence[int]) -> str:
    low, median, high = np.percentile(numbers or [0], (0, 50, 100))
    return f"{name:<28} {low:.0f} to {high:.0f}, median {median:.0f}"


def _get_name(image: ImageRef) -> str:
    return str(image.path) if image.path is not None else image.name


def _find_boxes_outside(example: Example, task: Task) -> Iterator[str]:
    answer: Any = example.answer
    if not (isinstance(answer, dict) and "boxes" in answer and example.images):
        return
    width, height = task.target_image(example).size
    for x1, y1, x2, y2 in gold_boxes(answer):
        # Tolerate one pixel: annotations are rounded.
        if x1 < -1 or y1 < -1 or x2 > width + 1 or y2 > height + 1:
            yield f"{example.id}: {[x1, y1, x2, y2]} in {width}x{height}"


def _describe_answers(examples: Sequence[Example]) -> Iterator[str]:
    total = max(1, len(examples))
    counts = Counter(e.answer for e in examples if isinstance(e.answer, int))
    if counts:
        shares = [f"{count}: {times / total:.1%}" for count, times in sorted(counts.items())]
        more = " …" if len(shares) > 20 else ""
        yield f"{'counts':<28} {', '.join(shares[:20])}{more}"
        yield f"{'always the most frequent':<28} {counts.most_common(1)[0][1] / total:.1%} right"
    answers = [e.answer for e in examples if isinstance(e.answer, dict)]
    boxes = [gold_boxes(answer) for answer in answers if "boxes" in answer]
    if boxes:
        numbers = sorted(Counter(len(row) for row in boxes).items())
        yield f"{'boxes per row':<28} " + ", ".join(f"{k}: {v}" for k, v in numbers[:20])
        sides = [((x2 - x1) * (y2 - y1)) ** 0.5 for row in boxes for x1, y1, x2, y2 in row]
        if sides:
            low, median, high = np.percentile(sides, (5, 50, 95))
            spread = f"5 %: {low:.0f}, median {median:.0f}, 95 %: {high:.0f}"
            yield f"{'box side in pixels':<28} {spread}"
    given = [[e.answer] if isinstance(e.answer, str) else e.answer for e in examples]
    texts = [a[0] for a in given if isinstance(a, list | tuple) and a and isinstance(a[0], str)]
    if texts:
        yield _describe_spread("characters per answer", list(map(len, texts)))
        common = Counter(texts).most_common(5)
        yield f"{'most frequent':<28} " + ", ".join(f"{t[:20]!r} {times}" for t, times in common)


# Images that show the same picture, after re-encoding or resizing.


def hash_image(image: Image.Image, load: Callable[[], Image.Image] | None = None) -> ImageHash:
    """Return the hash of a decoded image; re-encoding or resizing the image hardly changes it.

    ``load`` returns the image, for a closer look at it; None: the image is kept.
    """
    gray = image.convert("L")
    # A bit is set where the brightness rises from a cell to the next one in its row or column.
    across = np.asarray(gray.resize((9, 8), Image.Resampling.BOX), np.int16)
    down = np.asarray(gray.resize((8, 9), Image.Resampling.BOX), np.int16)
    bits = np.concatenate(
        [(np.diff(across, axis=1) > 0).ravel(), (np.diff(down, axis=0) > 0).ravel()]
    )
    bands = tuple(np.packbits(band).tobytes() for band in np.split(bits, _BANDS))
    thumbnail = image.convert("RGB").resize(_THUMBNAIL_SIZE, Image.Resampling.BOX)
    return ImageHash(bands, np.asarray(thumbnail), load or (lambda: image))


def find_duplicates(hashes: Sequence[ImageHash]) -> list[list[int]]:
    """Return groups of two or more indices whose hashes are of the same picture, in order.

    Hashes with a band in common and similar thumbnails are candidates; their pixels decide.
    """
    buckets: dict[tuple, list[int]] = defaultdict(list)
    for index, image_hash in enumerate(hashes):
        for number, band in enumerate(image_hash.bands):
            buckets[number, band].append(index)
    joined = DisjointSet(range(len(hashes)))
    for indices in buckets.values():
        for pair in _find_similar_pairs(indices, hashes):
            joined.merge(*pair)
    groups = [sorted(group) for group in joined.subsets() if len(group) > 1]
    return [equal for group in groups for equal in _split_by_pixels(group, hashes)]


def _split_by_pixels(indices: Sequence[int], hashes: Sequence[ImageHash]) -> list[list[int]]:
    groups: list[tuple[np.ndarray, list[int]]] = []
    for index in indices:
        pixels = _resize(hashes[index])
        for first, members in groups:
            if _share_of_changed(first, pixels) <= _MAX_CHANGED:
                members.append(index)
                break
        else:
            groups.append((pixels, [index]))
    return [members for _, members in groups if len(members) > 1]


def _resize(image_hash: ImageHash) -> np.ndarray:
    image = image_hash.load().convert("RGB")
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR), np.int16)


def measure_difference(first: ImageHash, second: ImageHash) -> float:
    """Return the share of the pixels of two images that differ, both resized to a common size."""
    return _share_of_changed(_resize(first), _resize(second))


def _share_of_changed(first: np.ndarray, second: np.ndarray) -> float:
    return float((np.abs(first - second).max(axis=2) > _MAX_DIFFERENCE).mean())


def _find_similar_pairs(
    indices: Sequence[int], hashes: Sequence[ImageHash]
) -> set[tuple[int, int]]:
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
