"""Loading of data as checked examples: of one source, and what a run trains and evaluates on."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

from scipy.cluster.hierarchy import DisjointSet

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.data import PYTHON, DataSettings, SourceSettings, Split, is_mixture
from vlm_grpo.config.filter import Filter
from vlm_grpo.config.run import MIXED, Settings
from vlm_grpo.data.boxes import TRIED_ROWS, BoxExtent, suggest_settings
from vlm_grpo.data.formats import open_source
from vlm_grpo.data.images import MediaReader
from vlm_grpo.data.objects import NO_OBJECTS, Objects, Rows, TaskObject, check_rows
from vlm_grpo.data.rows import Row, to_example
from vlm_grpo.errors import UserError, list_bad_rows
from vlm_grpo.task import Rule, Task
from vlm_grpo.task.coordinates import BoxError
from vlm_grpo.task.registry import (
    SET_BY_LIBRARY,
    check_trainable,
    get_options,
    get_task_name,
    load_task,
)
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example, ImageRef, VideoRef
from vlm_grpo.utils.jsonl import read_rows

logger = logging.getLogger(__name__)

_MAX_LISTED = 50  # Bad rows listed in one message; the rest are only counted
Examples = Sequence[Example]


def load_examples(
    source: str | Path | Rows, task: Task, data: DataSettings | None = None, split: Split = "eval"
) -> Examples:
    """Load all examples of a source and check each of them.

    Only the headers of the images are read, not their pixels.

    Args:
        source: as for ``vlm_grpo.data.formats.open_source``, or rows (mappings, a
            ``datasets.Dataset`` or ``Example``s).
        task: the task that checks the form of each answer and writes each prompt.
        data: image root, limits and the treatment of bad rows; None: the defaults.
        split: selects the limit, and the split of a source that has several.

    Raises:
        UserError: the source cannot be read, has no examples, or has bad rows (all are named)
            while ``data.on_bad_row`` is "error".
    """
    if isinstance(source, str | Path):
        own, rows = SourceSettings(source=str(source)), None
    else:
        check_rows("the data source", source)
        own, rows = SourceSettings(source=PYTHON), source
    data = DataSettings(train=own.source) if data is None else data
    return load_source(data.complete(own, split), task, data, split, rows=rows)


def load_source(
    source: SourceSettings,
    task: Task,
    data: DataSettings,
    split: Split,
    label: str = "",
    rows: Rows | None = None,
) -> Examples:
    """Load all examples of a source with settings of its own, as ``load_examples`` does.

    ``task`` may be a mixture of the tasks that the rows name, ``label`` is the source's name in a
    mixture, and ``rows`` are those of a source that is a Python object.
    """
    examples, problems = read_source(source, task, data, split, label, rows)
    name, count = str(source.source), len(problems)
    bad = "1 bad row" if count == 1 else f"{count} bad rows"
    if problems and (data.on_bad_row == "error" or not examples):
        remedy = "fix them; training can skip them with data.on_bad_row=skip"
        raise UserError(
            f"{name} has {bad} (good rows: {len(examples)}):\n"
            f"{list_bad_rows(problems, _MAX_LISTED)}\n{remedy if examples else 'fix them'}"
        )
    if problems:
        listed = list_bad_rows(problems, 5)
        logger.warning("%s: skipped %s, kept %d:\n%s", name, bad, len(examples), listed)
    if not examples:
        raise UserError(f"{name} has no examples")
    return examples


def read_source(
    source: SourceSettings,
    task: Task,
    data: DataSettings,
    split: Split,
    label: str = "",
    given: Rows | None = None,
) -> tuple[list[Example], list[str]]:
    """Return the good rows of a source as examples, and one problem for each bad row.

    A problem with a box names the settings that read all boxes of the first rows, if there are any.
    """
    limit, columns = source.limit, dict(source.columns)
    rows, folders = open_source(source.source if given is None else given, task, limit, split)
    if source.image_root is not None:
        folders = [source.image_root, *folders]
    reader = MediaReader(folders, data.max_image_pixels, data.video)
    task_column = columns.pop("task", None)
    own = source.model_copy(update={"columns": columns})
    read = partial(to_example, images=reader)
    examples: list[Example] = []
    problems: list[str] = []
    first_with_id: dict[str, int] = {}
    seen: dict[Any, Any] = {}
    tried: list[tuple[Row, Task]] = []
    extent, bad_box = BoxExtent(), None  # the first row with a bad box of the source's own form
    for row in rows:
        if limit is not None and len(examples) >= limit:
            break
        try:
            name, row_task = "", task
            if source.default_question is not None:
                row = replace(row, question=source.default_question)
            if task_column is not None:
                name, row_task, row = _pop_task(row, task_column, task)
            if len(tried) < TRIED_ROWS:
                tried.append((row, row_task))
            example = read(row, own, task=row_task)
            first = first_with_id.setdefault(example.id, len(examples))
            if first < len(examples):
                where = examples[first].location or f"example {first + 1}"
                raise ValueError(f"id {example.id!r} is a duplicate of {where}")
            if (earlier := row_task.find_repeat(example, seen)) is not None:
                raise ValueError(f"it repeats example {earlier}")
        except ValueError as error:
            has_own_form = row.problem is None and row.example is None and not row.in_pixels
            if bad_box is None and has_own_form and isinstance(error, BoxError):
                bad_box = len(problems)
            problems.append(f"{row.location}: {error}")
            continue
        extent.add(example, row_task)
        if label:
            name = f"{label}/{name}" if name else label
            example = replace(example, id=f"{label}/{example.id}", source=name)
        examples.append(example)
    if bad_box is not None:
        problems[bad_box] += suggest_settings(tried, own, read, is_mixed=bool(label))
    if extent.is_short:
        logger.warning("%s: %s", source.source, extent)
    return examples, problems


def _pop_task(row: Row, column: str, task: Task) -> tuple[str, Task, Row]:
    """Return the name of the task that a row names, that task, and the row without the name."""
    if row.problem is not None:
        raise ValueError(row.problem)
    values = dict(row.values)
    if not isinstance(name := values.pop(column, None), str):
        raise ValueError(f"its column {column} must name its task")
    name, part = task.resolve(Example("", (), "", None, source=name))
    return name, part, replace(row, values=values)


# The sources of a run, each of which may have a task of its own.


def _forward(name: str) -> Any:
    """Return a method that calls that of the task of its example, which is among its arguments."""

    def call(self: Mixed, *args: Any, **options: Any) -> Any:
        example = next(v for v in (*args, *options.values()) if isinstance(v, Example))
        return getattr(self.resolve(example)[1], name)(*args, **options)

    return call


class Mixed(Task):
    """Several tasks as one: each example has the task of its source.

    Rewards and metrics are named ``SOURCE/NAME``. The primary metric is the mean of the sources'
    primary metrics, in which an error e counts as 1 − e.
    """

    primary_metric = "score"
    members: Mapping[str, Task] = field(default_factory=dict)  # by ``Example.source``

    def __post_init__(self) -> None:
        super().__post_init__()
        common = {name: getattr(self, name) for name in SET_BY_LIBRARY}
        members = {name: replace(task, **common) for name, task in self.members.items()}
        object.__setattr__(self, "members", members)

    def resolve(self, example: Example) -> tuple[str, Task]:
        """Return the name of the example's source and its task; ``ValueError``: it has none."""
        if example.source not in self.members:
            raise ValueError(f"its source {example.source!r} is none of {', '.join(self.members)}")
        return example.source, self.members[example.source]

    def without_tools(self) -> Self:
        return replace(self, members={n: t.without_tools() for n, t in self.members.items()})

    question, prompt, instructions = map(_forward, ("question", "prompt", "instructions"))
    parse, read, write, check = map(_forward, ("parse", "read", "write", "check"))
    draw, gold_boxes, target_image = map(_forward, ("draw", "gold_boxes", "target_image"))
    gold, gold_reward, gold_answer = map(_forward, ("gold", "gold_reward", "gold_answer"))

    def reward_weights(self) -> dict[str, float]:
        return self._join({name: task.reward_weights() for name, task in self.members.items()})

    def reward_rules(self) -> dict[str, Rule]:
        return self._join({name: task.reward_rules() for name, task in self.members.items()})

    def _join(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {f"{source}/{name}": v for source, own in values.items() for name, v in own.items()}


def load_run_task(settings: Settings, objects: Objects = NO_OBJECTS) -> Task:
    """Load the task of a run: that of its settings, or the mixture of its sources' tasks.

    Python objects are loaded in place of what the settings name (``Objects.name_in``).
    """
    if not is_mixture(settings.data.train):
        return _load_task(objects.task, settings.task, settings.task_options)
    sources = settings.data.get_sources("train")
    return Mixed(members={n: t for s in sources for n, t in load_members(s, settings, objects)})


def _load_task(given: TaskObject | None, name: str, options: Mapping[str, Any]) -> Task:
    return given if isinstance(given, Task) else load_task(given or name, **options)


def load_members(
    source: SourceSettings, settings: Settings, objects: Objects = NO_OBJECTS
) -> Iterator[tuple[str, Task]]:
    """Yield the tasks of a source, each with the ``Example.source`` of its examples."""
    if source.tasks:
        for name, options in source.tasks.items():
            yield f"{source.label}/{name}", load_task(name, **options)
    elif source.task is None:
        options = {**settings.task_options, **source.task_options}
        yield source.label, _load_task(objects.task, settings.task, options)
    else:
        yield source.label, load_task(source.task, **source.task_options)


def load_split(
    settings: Settings, task: Task, split: Split, objects: Objects = NO_OBJECTS
) -> Examples:
    """Load the training or the held-out examples of a run from all of their sources.

    A mixture as ``task`` gives the examples the names of their sources. Errors are those of
    ``load_examples``.
    """
    found: list[Example] = []
    for source in settings.data.get_sources(split):
        own, label = task, source.label if isinstance(task, Mixed) else ""
        if isinstance(task, Mixed) and source.tasks:
            own = Mixed(members={name: task.members[f"{label}/{name}"] for name in source.tasks})
        elif isinstance(task, Mixed):
            own = task.members[label]
        rows = objects.train if split == "train" else objects.eval
        found += load_source(source, own, settings.data, split, label, rows)
    return found


def load_run(settings: Settings, objects: Objects = NO_OBJECTS) -> tuple[Task, Examples, Examples]:
    """Load what a run needs besides its model: its task, and its training and held-out examples."""
    task = load_run_task(settings, objects)
    for member in task.members.values() if isinstance(task, Mixed) else [task]:
        check_trainable(member)
    return task, *load_data(settings, task, objects)


def load_data(
    settings: Settings, task: Task, objects: Objects = NO_OBJECTS
) -> tuple[Examples, Examples]:
    """Load the training and the held-out examples of a run.

    Log a warning if both are the same data or share images, and if ``data.video`` is given but no
    example has a video.
    """
    data, train = settings.data, load_split(settings, task, "train", objects)
    held_out: Examples = []
    if data.eval_share is not None:
        train, held_out = split_by_image(train, data.eval_share, settings.seed)
    train, line = filter_examples(train, data)  # the held-out examples stay the same
    if line is not None and os.environ.get("RANK", "0") == "0":
        logger.info(line)
    if data.eval is not None:
        held_out = load_split(settings, get_held_out_task(settings, task), "eval", objects)
        sources, others = ({s.source for s in data.get_sources(n)} for n in ("train", "eval"))
        if not all(map(stands_for_both, sources & others)):
            logger.warning("data.eval is data.train: the evaluation is not on held-out examples")
        warn_about_shared_images(train, held_out)
    media = chain.from_iterable(example.images for example in chain(train, held_out))
    if data.video is not None and not any(isinstance(image, VideoRef) for image in media):
        logger.warning("data.video has no effect: no example has a video")
    return train, held_out


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


def build_scorer(settings: Settings, rank: int) -> RewardScorer:
    """Build the scorer of one rank of a run; its cache is in the run's folder."""
    rollout = settings.rollout
    cache = settings.run_dir / "reward_cache" / f"rank-{rank}.jsonl"
    return RewardScorer(rollout.reward_timeout, rollout.reward_workers, cache)


def filter_examples(examples: Examples, data: DataSettings) -> tuple[Examples, str | None]:
    """Return the examples that ``data.filter`` accepts, and a line with their number.

    A column is that of ``data.difficulty`` for the example's id, or else that of its row.
    """
    if data.filter is None:
        return examples, None
    chosen = Filter(data.filter)
    known = {} if data.difficulty is None else _read_difficulty(data.difficulty)
    kept, problems = [], []
    for example in examples:
        values = {**example.meta, **known.get(example.id, {})}
        missing = chosen.find_missing(values)
        problems += (f"{example.name}: it has no number {name}" for name in missing)
        if not missing and chosen.accepts(values):
            kept.append(example)
    if problems:
        where = "its rows" if data.difficulty is None else f"{data.difficulty} or its rows"
        raise UserError(
            f"data.filter={data.filter!r} needs numbers in {where}:\n{list_bad_rows(problems, 5)}\n"
            "vlm-grpo sample RECIPE --difficulty FILE writes pass_rate by id, for "
            "data.difficulty=FILE"
        )
    if not kept:
        ranges = []
        for name in chosen.names:
            values = [{**e.meta, **known.get(e.id, {})}[name] for e in examples]
            ranges.append(f"{name} from {min(values):g} to {max(values):g}")
        raise UserError(
            f"data.filter={data.filter!r} accepts none of the {len(examples)} training examples; "
            f"they have {', '.join(ranges)}"
        )
    line = f"data.filter={data.filter!r} keeps {len(kept):,} of {len(examples):,} training examples"
    return kept, line


def _read_difficulty(path: Path) -> dict[str, Mapping[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {}
    try:
        for number, row in enumerate(read_rows(path), start=1):
            if not isinstance(name := row.get("id"), str):
                raise UserError(f"{path}:{number} has no id: give a file of sample --difficulty")
            rows[name] = row
    except OSError as error:
        raise UserError(f"data.difficulty={path} cannot be read: {error.strerror}") from error
    return rows


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
