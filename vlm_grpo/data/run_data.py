"""The examples of a run, and the task that scores the held-out ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.data import SourceSettings
from vlm_grpo.config.run import MIXED, Settings
from vlm_grpo.data.checks import warn_about_shared_images
from vlm_grpo.data.filtering import filter_examples
from vlm_grpo.data.image_split import split_by_image
from vlm_grpo.data.mixture import Mixed, load_members, load_run_task, load_split
from vlm_grpo.data.objects import NO_OBJECTS, Objects
from vlm_grpo.data.splits import stands_for_both
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.names import SET_BY_LIBRARY, get_options, get_task_name
from vlm_grpo.task.registry import check_trainable, load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example, VideoRef

logger = logging.getLogger(__name__)


def load_run(
    settings: Settings, objects: Objects = NO_OBJECTS
) -> tuple[Task, Sequence[Example], Sequence[Example]]:
    """Load what a run needs besides its model: its task, and its training and held-out examples.

    Raises:
        UserError: as for ``load_run_task`` and ``load_data``, or a task's rewards have no weight.
    """
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

    Args:
        settings: the run's settings.
        task: the run's task.
        objects: rows of sources that are Python objects.

    Raises:
        UserError: the data cannot be read, does not fit the tasks, or cannot be split.
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
            source.source == other.source and not stands_for_both(source.source)
            for source in data.get_sources("train")
            for other in data.get_sources("eval")
        ):
            logger.warning("data.eval is data.train: the evaluation is not on held-out examples")
        warn_about_shared_images(train, held_out)
    if data.video is not None and not any(map(_has_video, chain(train, held_out))):
        logger.warning("data.video has no effect: no example has a video")
    return train, held_out


def _has_video(example: Example) -> bool:
    return any(isinstance(image, VideoRef) for image in example.images)


def get_held_out_task(settings: Settings, task: Task) -> Task:
    """Return the task that scores the held-out examples: the run's, or that of a benchmark.

    A source of a mixture without a task has that of the training source of its name, or the run's.

    A benchmark with the run's task gets the run's task options; another one gets only the options
    that every task has. The prompt has the same form as in training: tags and thinking are those of
    the run, whatever the models of the benchmark's published results were asked to write.

    Args:
        settings: settings of the run.
        task: task of the run, with the coordinate frame of the policy.

    Raises:
        UserError: there is no such benchmark, or a held-out source has no task.
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
