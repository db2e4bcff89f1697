"""The held-out examples: their share of the data, their images and their task."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from scipy.cluster.hierarchy import DisjointSet

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.data import PYTHON, SourceSettings
from vlm_grpo.config.run import MIXED, Settings
from vlm_grpo.data.mixed_task import Mixed, load_members
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.registry import SET_BY_LIBRARY, get_options, get_task_name, load_task
from vlm_grpo.types import Examples, ImageRef, VideoRef

logger = logging.getLogger(__name__)


def warn_about_shared_images(train: Examples, held_out: Examples) -> None:
    """Log how many held-out examples show an image of the training data, if any.

    Images are compared by path and encoded bytes, without decoding them.
    """
    trained = {_get_key(image, "path") for example in train for image in example.images}
    shared = [e.id for e in held_out if any(_get_key(i, "path") in trained for i in e.images)]
    if shared:
        logger.warning(
            "%d of %d held-out examples show an image that is also trained on (first: %s): their "
            "score does not measure unseen images",
            len(shared),
            len(held_out),
            ", ".join(shared[:3]),
        )


def _get_key(image: ImageRef, attribute: Literal["name", "path"]) -> str:
    """Return what is equal for equal images: the file, by an attribute, or a digest of the bytes;
    of a clip given by its frames, theirs; of a part of an image, the whole's."""
    image = image.origin
    if isinstance(image, VideoRef) and image.frames:
        return " ".join(_get_key(frame, attribute) for frame in image.frames)
    if image.path is not None:
        return f"file {getattr(image, attribute)}"
    return f"data {hashlib.blake2b(image.read_bytes()).hexdigest()}"


def stands_for_both(source: object) -> bool:
    """Return whether the name of a source stands for both its training and its held-out part."""
    is_named = source == PYTHON or re.match(r"embedded:|hf:[^:]*(::|$)", str(source)) is not None
    path = Path(str(source))
    return is_named or path.suffix in (".yaml", ".yml") or path.is_dir()


def get_held_out_task(settings: Settings, task: Task) -> Task:
    """Return the task that scores the held-out examples: the run's, or that of a benchmark.

    A source of a mixture without a task has that of the training source of its name, or the run's.

    A benchmark with the run's task gets the run's task options; another one gets only the options
    that every task has. The prompt has the same form as in training: tags and thinking are those of
    the run, whatever the models of the benchmark's published results were asked to write.
    """
    if settings.is_mixture and settings.data.eval is not None:
        sources = settings.data.get_sources("eval")
        members = {name: t for s in sources for name, t in _get_members(s, settings, task)}
        return Mixed(members=members, **{name: getattr(task, name) for name in SET_BY_LIBRARY})
    if settings.evaluation.benchmark is None:
        return task
    name, own = settings.task, settings.task_options
    return _load_benchmark_task(settings.evaluation.benchmark, name, own, task)


def _get_members(
    source: SourceSettings, settings: Settings, task: Task
) -> Iterator[tuple[str, Task]]:
    label = source.label
    trained = task.members.get(label) if isinstance(task, Mixed) else task
    if source.benchmark is not None:
        like = trained or task
        name = get_task_name(type(like))
        yield label, _load_benchmark_task(source.benchmark, name, get_options(like), like)
    elif source.task is None and not source.tasks and trained is not None:
        yield label, load_task(trained, **source.task_options)
    elif source.task is not None or source.tasks or settings.task != MIXED:
        yield from load_members(source, settings)
    else:
        raise UserError(
            f"data.eval: source {label} has no task: give it a task, or the name of a source of "
            "data.train, whose task it then has"
        )


def _load_benchmark_task(
    benchmark_name: str, task_name: str, options: Mapping[str, Any], task: Task
) -> Task:
    """Load a benchmark's task, with the form of the answers of a run's ``task``."""
    benchmark = load_benchmark(benchmark_name)
    own = options if benchmark.task == task_name else {}
    form = {name: getattr(task, name) for name in ("tags", "thinking", "thinking_tags")}
    return benchmark.load_task(task.frame, **{**own, **form})


def split_by_image(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Hold out a share of the examples; examples with an image in common stay together.

    Whole sets of examples are held out, in the order of a hash of their images and the seed, until
    the share is reached. The order of the rows and the folder of the images do not matter. Both
    parts keep the order of ``examples``.
    """
    sets = _join_by_image(examples)
    digests = [
        hashlib.blake2b(f"{seed} {key}".encode(errors="backslashreplace")).digest() for key in sets
    ]
    held_out: set[int] = set()
    for _, members in sorted(zip(digests, sets.values(), strict=True)):
        if len(held_out) >= max(1, round(share * len(examples))):
            break
        held_out.update(members)
    if len(held_out) in (0, len(examples)):
        raise UserError(
            f"data.eval_share={share:g} cannot split the {len(examples)} training examples, which "
            f"have {len(sets)} separate sets of images: give data.eval"
        )
    kept = [example for index, example in enumerate(examples) if index not in held_out]
    return kept, [examples[index] for index in sorted(held_out)]


def _join_by_image(examples: Examples) -> dict[str, list[int]]:
    # The folder does not matter. Texts without images are told apart by their questions.
    keys = [[_get_key(i, "name") for i in e.images] or [f"text {e.question}"] for e in examples]
    joined = DisjointSet(dict.fromkeys(chain.from_iterable(keys)))
    for first, *others in keys:
        for other in others:
            joined.merge(first, other)
    least = {key: min(own) for own in joined.subsets() for key in own}
    sets: dict[str, list[int]] = defaultdict(list)
    for place, own in enumerate(keys):
        sets[least[own[0]]].append(place)
    return sets
