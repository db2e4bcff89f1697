"""The examples of a run and the task that scores the held-out ones; filters and splits."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.data import PYTHON, DataSettings, SourceSettings
from vlm_grpo.config.filter import Filter, check_number
from vlm_grpo.config.run import MIXED, Settings
from vlm_grpo.data.checks import warn_about_shared_images
from vlm_grpo.data.loading import Mixed, load_members, load_run_task, load_split
from vlm_grpo.data.objects import NO_OBJECTS, Objects
from vlm_grpo.data.store import ExampleView
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.task import Task
from vlm_grpo.task.registry import (
    SET_BY_LIBRARY,
    check_trainable,
    get_options,
    get_task_name,
    load_task,
)
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example, VideoRef
from vlm_grpo.utils.jsonl import read_rows

logger = logging.getLogger(__name__)


def load_run(
    settings: Settings, objects: Objects = NO_OBJECTS
) -> tuple[Task, Sequence[Example], Sequence[Example]]:
    """Load what a run needs besides its model: its task, and its training and held-out examples."""
    task = load_run_task(settings, objects)
    for member in task.members.values() if isinstance(task, Mixed) else [task]:
        check_trainable(member)
    return task, *load_data(settings, task, objects)


def load_data(
    settings: Settings, task: Task, objects: Objects = NO_OBJECTS
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Load the training and the held-out examples of a run.

    Log a warning if both are the same data or share images, and if ``data.video`` is given but no
    example has a video.
    """
    data, train = settings.data, load_split(settings, task, "train", objects)
    held_out: Sequence[Example] = []
    if data.eval_share is not None:
        train, held_out = split_by_image(train, data.eval_share, settings.seed)
    train, line = filter_examples(train, data)  # the held-out examples stay the same
    if line is not None and os.environ.get("RANK", "0") == "0":
        logger.info(line)
    if data.eval is not None:
        held_out = load_split(settings, get_held_out_task(settings, task), "eval", objects)
        if any(
            source.source == other.source and not _stands_for_both(source.source)
            for source in data.get_sources("train")
            for other in data.get_sources("eval")
        ):
            logger.warning("data.eval is data.train: the evaluation is not on held-out examples")
        warn_about_shared_images(train, held_out)
    media = chain.from_iterable(example.images for example in chain(train, held_out))
    if data.video is not None and not any(isinstance(image, VideoRef) for image in media):
        logger.warning("data.video has no effect: no example has a video")
    return train, held_out


def _stands_for_both(source: object) -> bool:
    """Return whether the name of a source stands for both its training and its held-out part."""
    is_named = source == PYTHON or str(source).startswith(("embedded:", "hf:"))
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
    """Yield the tasks of a held-out source, each with the ``Example.source`` of its examples."""
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


def build_scorer(settings: Settings, rank: int) -> RewardScorer:
    """Build the scorer of one rank of a run; its cache is in the run's folder."""
    rollout = settings.rollout
    cache = settings.run_dir / "reward_cache" / f"rank-{rank}.jsonl"
    return RewardScorer(rollout.reward_timeout, rollout.reward_workers, cache)


def filter_examples(
    examples: Sequence[Example], data: DataSettings
) -> tuple[Sequence[Example], str | None]:
    """Return the examples that ``data.filter`` accepts, and a line with their number.

    A column is that of ``data.difficulty`` for the example's id, or else that of its row.
    """
    if data.filter is None:
        return examples, None
    chosen = Filter(data.filter)
    known = {} if data.difficulty is None else _read_difficulty(data.difficulty)
    kept, problems = [], []
    for index, example in enumerate(examples):
        values = {**example.meta, **known.get(example.id, {})}
        missing = [name for name in chosen.names if not check_number(values.get(name))]
        problems += (f"{example.name} has no number {name}" for name in missing)
        if not missing and chosen.accepts(values):
            kept.append(index)
    if problems:
        where = "its rows" if data.difficulty is None else f"{data.difficulty} or its rows"
        raise UserError(
            f"data.filter={data.filter!r} needs numbers in {where}:\n{bullets(problems, 5)}\n"
            "vlm-grpo sample RECIPE --difficulty FILE writes pass_rate by id, for "
            "data.difficulty=FILE"
        )
    if not kept:
        raise UserError(
            f"data.filter={data.filter!r} accepts none of the {len(examples)} training examples; "
            f"they have {_describe_range(examples, known, chosen.names)}"
        )
    line = f"data.filter={data.filter!r} keeps {len(kept):,} of {len(examples):,} training examples"
    return ExampleView(examples, chosen=kept), line


def _read_difficulty(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a file of ``vlm-grpo sample --difficulty`` by id."""
    rows: dict[str, Mapping[str, Any]] = {}
    try:
        for number, row in enumerate(read_rows(path), start=1):
            if not isinstance(name := row.get("id"), str):
                raise UserError(f"{path}:{number} has no id: give a file of sample --difficulty")
            rows[name] = row
    except OSError as error:
        raise UserError(f"data.difficulty={path} cannot be read: {error.strerror}") from error
    return rows


def _describe_range(
    examples: Sequence[Example], known: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> str:
    ranges = []
    for name in names:
        values = [{**e.meta, **known.get(e.id, {})}[name] for e in examples]
        ranges.append(f"{name} from {min(values):g} to {max(values):g}")
    return ", ".join(ranges)


def split_by_image(
    examples: Sequence[Example], share: float, seed: int
) -> tuple[Sequence[Example], Sequence[Example]]:
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
    kept = (index for index in range(len(examples)) if index not in held_out)
    return ExampleView(examples, chosen=kept), ExampleView(examples, chosen=sorted(held_out))


def _join_by_image(examples: Sequence[Example]) -> dict[str, list[int]]:
    """Return the places of the examples that images connect, by the least of their images' keys."""
    keys = [list(_get_keys(example)) for example in examples]
    numbers = {
        key: len(examples) + n for n, key in enumerate(dict.fromkeys(chain.from_iterable(keys)))
    }
    edges = [(place, numbers[key]) for place, own in enumerate(keys) for key in own]
    size = len(examples) + len(numbers)
    graph = coo_array((np.ones(len(edges)), np.transpose(edges)), shape=(size, size))
    labels = connected_components(graph, directed=False)[1]
    first: dict[int, str] = {}
    for key, number in numbers.items():
        first[labels[number]] = min(key, first.get(labels[number], key))
    sets: dict[str, list[int]] = defaultdict(list)
    for place in range(len(examples)):
        sets[first[labels[place]]].append(place)
    return sets


def _get_keys(example: Example) -> Iterator[str]:
    """Yield a key per image, equal for equal images; of a text alone, one of its question."""
    if not example.images:
        yield f"text {example.question}"
    for image in example.images:
        if image.path is not None:
            yield f"file {image.name}"
        else:
            yield f"data {hashlib.blake2b(image.read_bytes()).hexdigest()}"
