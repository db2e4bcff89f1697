"""Checks of a dataset: bad rows, unreadable images, equal images, answer statistics."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vlm_grpo.config.data import DataSettings, SourceSettings, Split
from vlm_grpo.data.boxes import list_evidence
from vlm_grpo.data.held_out import stands_for_both
from vlm_grpo.data.loading import read_source
from vlm_grpo.errors import bullets, list_bad_rows
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import Box, gold_boxes
from vlm_grpo.types import Example, ImageRef

_MAX_LISTED = 10  # Problems listed under each heading of a report

Measure = Callable[[Sequence[Example], Task], tuple[list[int] | None, list[str]]]
"""Returns the numbers of tokens of examples' prompts (None: unknown), and the problems of those
that cannot be built."""


@dataclass(frozen=True)
class DataReport:
    """The findings of a check of one source."""

    source: str  # the source's name
    title: str  # the same, with the part that was checked if there are several
    examples: Sequence[Example]  # the good rows
    # the problems of each kind, by its name; a kind without any was checked
    problems: dict[str, list[str]]
    passed: bool  # there are examples, and no problems that training would not skip
    statistics: Sequence[str]  # lines on the gold answers and the prompts
    # a digest of the pixels of every image that can be decoded, by the image's name
    digests: dict[str, bytes] = field(repr=False)

    def describe(self) -> Iterator[str]:
        """Yield the lines that the command line prints."""
        good_rows, readable = len(self.examples), len(self.digests)
        yield f"{self.title}: {good_rows} good rows, {readable} readable images"
        for name, problems in self.problems.items():
            yield f"  {name:<28} {len(problems)}"
            if problems:
                yield list_bad_rows(problems, _MAX_LISTED)
        groups = [group for group in _group(self.digests).values() if len(group) > 1]
        yield f"  {'duplicate images':<28} {sum(map(len, groups))} in {len(groups)} groups"
        for group in groups[:_MAX_LISTED]:
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
    digests: dict[str, bytes] = {}
    unreadable: dict[str, str] = {}
    images = {_get_name(i): (i, e) for e in examples for i in e.images}
    for name, (image, example) in images.items():
        try:
            pixels = image.load()
            digests[name] = hashlib.blake2b(repr(pixels.size).encode() + pixels.tobytes()).digest()
        except ValueError as error:
            unreadable[name] = f"{example.name}: {error}"
    readable = [e for e in examples if not any(_get_name(i) in unreadable for i in e.images)]
    lengths, bad_prompts = measure(readable, task)
    problems = {
        "bad rows": bad_rows,
        "unreadable images": list(unreadable.values()),
        "prompts that cannot be built": bad_prompts,
    }
    unchecked = "not checked without --model: control tokens in the text, the chat template, the "
    prompts = unchecked + "lengths of the prompts"
    if lengths is not None:
        prompts = _describe_spread("tokens per prompt", lengths)
    other = "train" if split == "eval" else "eval"
    part = f", part {split} (--split {other}: the other one)" * stands_for_both(source)
    skipped = {"bad rows"} if data.on_bad_row == "skip" else set()
    passed = bool(examples) and {name for name, own in problems.items() if own} <= skipped
    statistics = [*_describe_answers(examples), prompts]
    return DataReport(source, source + part, examples, problems, passed, statistics, digests)


def describe_overlap(first: DataReport, second: DataReport) -> list[str]:
    """Return lines on the images and ids that two sources have in common.

    Images of equal pixels are the same. Ids that only number the rows of a source do not count.
    """
    known = _group(first.digests)
    images = [f"{n} is {known[d][0]}" for n, d in second.digests.items() if d in known]
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


def _group(digests: Mapping[str, bytes]) -> dict[bytes, list[str]]:
    groups: dict[bytes, list[str]] = defaultdict(list)
    for name, digest in digests.items():
        groups[digest].append(name)
    return groups


def _describe_spread(name: str, numbers: Sequence[int]) -> str:
    low, median, high = np.percentile(numbers or [0], (0, 50, 100))
    return f"{name:<28} {low:.0f} to {high:.0f}, median {median:.0f}"


def _get_name(image: ImageRef) -> str:
    return str(image.path) if image.path is not None else image.name


def _describe_answers(examples: Sequence[Example]) -> Iterator[str]:
    total = max(1, len(examples))
    counts = Counter(e.answer for e in examples if isinstance(e.answer, int))
    if counts:
        shares = [f"{count}: {times / total:.1%}" for count, times in sorted(counts.items())]
        more = " …" if len(shares) > 20 else ""
        yield f"{'counts':<28} {', '.join(shares[:20])}{more}"
        yield f"{'always the most frequent':<28} {counts.most_common(1)[0][1] / total:.1%} right"
    answers = [e.answer for e in examples if isinstance(e.answer, dict)]
    yield from _describe_boxes("box", [gold_boxes(a) for a in answers if "boxes" in a])
    evidence = [list_evidence(example) for example in examples]
    if any(evidence):
        yield from _describe_boxes("evidence box", evidence)
    given = [[e.answer] if isinstance(e.answer, str) else e.answer for e in examples]
    texts = [a[0] for a in given if isinstance(a, list | tuple) and a and isinstance(a[0], str)]
    if texts:
        yield _describe_spread("characters per answer", list(map(len, texts)))
        common = Counter(texts).most_common(5)
        yield f"{'most frequent':<28} " + ", ".join(f"{t[:20]!r} {times}" for t, times in common)


def _describe_boxes(name: str, rows: Sequence[Sequence[Box]]) -> Iterator[str]:
    if rows:
        numbers = sorted(Counter(map(len, rows)).items())
        counts = ", ".join(f"{k}: {v}" for k, v in numbers[:20])
        yield f"{f'{name}es per row':<28} {counts}"
    if sides := [((x2 - x1) * (y2 - y1)) ** 0.5 for row in rows for x1, y1, x2, y2 in row]:
        low, median, high = np.percentile(sides, (5, 50, 95))
        spread = f"5 %: {low:.0f}, median {median:.0f}, 95 %: {high:.0f}"
        yield f"{f'{name} side in pixels':<28} {spread}"
