"""Checks of a dataset: bad rows, unreadable images, duplicate images, answer statistics."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data.duplicates import ImageHash, find_duplicates, hash_image, measure_difference
from vlm_grpo.data.loading import read_examples
from vlm_grpo.data.splits import Split
from vlm_grpo.errors import bullets
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import gold_boxes
from vlm_grpo.types import Example, FileSlice, ImageRef, VideoRef

logger = logging.getLogger(__name__)

_END_BYTES = 4096
"""Number of bytes at each end of an encoded image that tell it from others of its length."""
_MAX_LISTED = 10
"""Problems listed under each heading of a report."""


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
        prompt_tokens: number of tokens of each prompt that could be built; None: not checked.
        bad_prompts: problems of the others.
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
    prompt_tokens: Sequence[int] | None = None
    bad_prompts: Sequence[str] = ()
    hashes: dict[str, ImageHash] = field(default_factory=dict, repr=False)

    @property
    def passed(self) -> bool:
        """Return whether nothing is wrong; duplicates within a source are allowed."""
        return bool(self.examples) and not any(problems for _, problems in self.problems)

    @property
    def problems(self) -> list[tuple[str, Sequence[str]]]:
        """The problems of each kind, with their name."""
        kinds = [
            ("bad rows", self.bad_rows),
            ("unreadable images", self.unreadable_images),
            ("boxes outside their image", self.boxes_outside),
        ]
        if self.prompt_tokens is not None:
            kinds.append(("prompts that cannot be built", self.bad_prompts))
        return kinds


@dataclass(frozen=True)
class Overlap:
    """What two sources have in common.

    Attributes:
        first, second: the sources' names.
        images: names of images that show the same picture, one of each source, and the share of
            pixels that differ. Every such image of the second source appears once.
        ids: ids of examples of both, without ids that only number the rows of a source.
    """

    first: str
    second: str
    images: Sequence[tuple[str, str, float]]
    ids: Sequence[str]

    @property
    def found(self) -> bool:
        """Return whether they have anything in common."""
        return bool(self.images or self.ids)


class Measures(NamedTuple):
    """How to count tokens.

    Attributes:
        count_tokens: returns the number of tokens of an image or a clip.
        measure_prompts: returns the numbers of tokens of the prompts of some examples, and the
            problems of those that cannot be built.
    """

    count_tokens: Callable[[ImageRef], int] | None = None
    measure_prompts: Callable[[Sequence[Example], Task], tuple[list[int], list[str]]] | None = None


def check_source(
    source: str,
    task: Task,
    data: DataSettings | None = None,
    measures: Measures | None = None,
    split: Split = "eval",
) -> DataReport:
    """Check every row and decode every image of a source.

    Args:
        source: as for ``load_examples``.
        task: the task that checks the form of each answer.
        data: image root and limits.
        measures: how to count tokens; None: they are not counted.
        split: selects the limit, and the split of a source that has several.

    Raises:
        UserError: the source cannot be read at all.
    """
    data = DataSettings(train=source) if data is None else data
    count_tokens, measure_prompts = measures or Measures()
    examples, bad_rows = read_examples(source, task, data, split)
    images = {
        _get_name(image): (image, example) for example in examples for image in example.images
    }
    hashes: dict[str, ImageHash] = {}
    unreadable: dict[str, str] = {}
    for name, (image, example) in images.items():
        try:
            hashes[name] = hash_image(image.load(), image.load)
        except ValueError as error:
            unreadable[name] = f"{example.name}: {error}"
    readable = [e for e in examples if not any(_get_name(i) in unreadable for i in e.images)]
    lengths, bad_prompts = (
        (None, []) if measure_prompts is None else measure_prompts(readable, task)
    )
    names = list(hashes)
    groups = find_duplicates(list(hashes.values()))
    return DataReport(
        source=source,
        examples=examples,
        bad_rows=bad_rows,
        unreadable_images=list(unreadable.values()),
        boxes_outside=[line for e in examples for line in _find_boxes_outside(e, task)],
        duplicates=[[names[i] for i in group] for group in groups],
        answers=list(_describe_answers(examples)),
        image_tokens=[]
        if count_tokens is None
        else [sum(map(count_tokens, e.images)) for e in examples],
        prompt_tokens=lengths,
        bad_prompts=bad_prompts,
        hashes=hashes,
    )


def find_overlap(first: DataReport, second: DataReport) -> Overlap:
    """Return the images and ids that two sources have in common."""
    names = [*first.hashes, *second.hashes]
    hashes = [*first.hashes.values(), *second.hashes.values()]
    images = []
    for group in find_duplicates(hashes):
        in_first = [i for i in group if i < len(first.hashes)]
        if in_first:
            match = in_first[0]
            images += [
                (names[match], names[i], measure_difference(hashes[match], hashes[i]))
                for i in group
                if i >= len(first.hashes)
            ]
    ids = {example.id for example in first.examples} & {example.id for example in second.examples}
    return Overlap(
        first.source,
        second.source,
        images,
        sorted(name for name in ids if not re.fullmatch(r"row-\d+", name)),
    )


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
    """Return the image's path, or a digest of the length and both ends of its encoded bytes; of a
    clip given by its frames, one of theirs."""
    if image.path is not None:
        return image.path
    if isinstance(image, VideoRef) and image.frames:
        parts = repr([_get_identity(frame) for frame in image.frames])
        return hashlib.blake2b(parts.encode("utf-8", "surrogateescape"), digest_size=16).digest()
    if isinstance(data := image.data, FileSlice) and data.size > 2 * _END_BYTES:
        last = data.start + data.size - _END_BYTES
        ends = [FileSlice(data.path, start, _END_BYTES).read() for start in (data.start, last)]
        size = data.size
    else:
        content = image.read_bytes()
        size, ends = len(content), [content[:_END_BYTES], content[-_END_BYTES:]]
    return hashlib.blake2b(b"".join([size.to_bytes(8), *ends]), digest_size=16).digest()


def format_report(report: DataReport) -> Iterator[str]:
    """Yield the lines that the command line prints for one source."""
    good_rows, readable = len(report.examples), len(report.hashes)
    yield f"{report.source}: {good_rows} good rows, {readable} readable images"
    for name, problems in report.problems:
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
    yield f"  {describe_lengths(report.prompt_tokens)}"


def describe_lengths(lengths: Sequence[int] | None) -> str:
    """Return a line on the prompts' numbers of tokens; None: they were not counted."""
    if lengths is None:
        return (
            "not checked without --model: control tokens in the text, the chat template, the "
            "lengths of the prompts"
        )
    low, median, high = np.percentile(lengths or [0], (0, 50, 100))
    return f"{'tokens per prompt':<28} {low:.0f} to {high:.0f}, median {median:.0f}"


def format_overlap(overlap: Overlap) -> Iterator[str]:
    """Yield the lines that the command line prints about images and ids in both sources."""
    if not overlap.found:
        yield f"{overlap.first} and {overlap.second} have no image and no id in common"
        return
    yield "!" * 78
    if overlap.images:
        yield f"{len(overlap.images)} IMAGES of {overlap.second} ARE ALSO IN {overlap.first}:"
        yield bullets(
            [
                f"{in_second} is {in_first} ({changed:.1%} of the pixels differ)"
                for in_first, in_second, changed in overlap.images
            ],
            _MAX_LISTED,
        )
    if overlap.ids:
        yield f"{len(overlap.ids)} IDS ARE IN BOTH: {', '.join(overlap.ids[:_MAX_LISTED])}"
    yield "A model trained on one and evaluated on the other has seen test data."
    yield "!" * 78


def _get_name(image: ImageRef) -> str:
    return str(image.path) if image.path is not None else image.name


def _find_boxes_outside(example: Example, task: Task) -> Iterator[str]:
    """Yield a line for each gold box that extends beyond its image."""
    answer: Any = example.answer
    if not (isinstance(answer, dict) and "boxes" in answer and example.images):
        return
    width, height = task.target_image(example).size
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
    texts = [a if isinstance(a := e.answer, str) else a[0] for e in examples if _is_text(e.answer)]
    if texts:
        low, median, high = np.percentile([len(text) for text in texts], (0, 50, 100))
        yield f"{'characters per answer':<28} {low:.0f} to {high:.0f}, median {median:.0f}"
        common = ", ".join(
            f"{text[:20]!r} {times}" for text, times in Counter(texts).most_common(5)
        )
        yield f"{'most frequent':<28} {common}"


def _is_text(answer: Any) -> bool:
    texts = [answer] if isinstance(answer, str) else answer
    return isinstance(texts, list | tuple) and bool(texts) and isinstance(texts[0], str)
